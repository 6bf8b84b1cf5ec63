"""What a kernel touches in terms of its parameters: the forms, against kernels whose author knows them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.ptx import symbolic
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.summary import EntrySummary, SiteSummary, summarise
from tests.ptx.launches import module


def summary(body: str, parameters: str = ".param .u64 x, .param .u64 y, .param .u32 n") -> EntrySummary:
    text = f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry work({parameters})
.reqntid 128
{{
  .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  {body}
  ret;
}}
"""
    return summarise(parse_module(text, "work.ptx"), "work")


def only(found: EntrySummary) -> SiteSummary:
    (site,) = found.sites
    return site


def test_a_guarded_element() -> None:
    found = summary(
        "ld.param.u32 %r9, [n]; shl.b32 %r3, %r1, 10; shl.b32 %r4, %r2, 2; and.b32 %r5, %r4, 508;"
        "or.b32 %r6, %r3, %r5; setp.lt.s32 %p1, %r6, %r9; mul.wide.s32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2;"
        "@%p1 ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd3];"
    )
    site = only(found)
    assert (site.parameter, site.mode, site.bytes, site.bounded) == ("x", "read", 16, True)
    assert site.at == "x + 16*(ctaid.x*256 + tid.x)"
    assert site.condition == "4*(ctaid.x*256 + tid.x) < n"
    kinds = [(p.pointer, p.read, p.written, p.used) for p in found.parameters]
    assert kinds == [(True, True, False, True), (False, False, False, False), (False, False, False, True)]
    assert found.block == (128, 1, 1) and not found.fallbacks


def test_a_branch_around_and_a_loop() -> None:
    found = summary(
        "ld.param.u32 %r9, [n]; setp.ge.s32 %p1, %r2, %r9; @%p1 bra END;\n"
        "mul.wide.s32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2;\n"
        "LOOP: st.global.u32 [%rd3+8], 1;\nadd.s64 %rd3, %rd3, 512;\n"
        "add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, 9; @%p2 bra LOOP; END:"
    )
    site = only(found)
    assert site.condition == "tid.x < n"
    line = site.line + 1  # of the instruction that adds
    assert site.at == f"x + 4*(i{line}*128 + tid.x + 2)"
    assert site.mode == "write" and site.bounded


def test_a_register_that_is_changed_in_another_way_than_by_adding_has_no_form() -> None:
    found = summary(
        "shl.b32 %r3, %r1, 7; or.b32 %r3, %r3, %r9; mul.wide.s32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2;"
        "st.global.u32 [%rd3], 1;"
    )
    assert not only(found).bounded and "value@" in only(found).at


def test_an_unrolled_loop_keeps_the_base_and_a_choice_keeps_both() -> None:
    found = summary(
        "LOOP: st.global.u32 [%rd1], 1; setp.lt.s32 %p1, %r2, 9; @%p1 bra ODD;\n add.s64 %rd1, %rd1, 4; bra LOOP;"
        "ODD: add.s64 %rd1, %rd1, 12; bra LOOP;"
    )
    assert (only(found).parameter, only(found).bounded) == ("x", False)
    chosen = summary(
        "ld.param.u64 %rd2, [y]; setp.lt.s32 %p1, %r2, 9; mov.u64 %rd3, %rd1;\n@%p1 mov.u64 %rd3, %rd2;"
        "st.global.u32 [%rd3+4], 1;"
    )
    assert [(s.parameter, s.bounded) for s in chosen.sites] == [("x", False), ("y", False)]
    assert [p.written for p in chosen.parameters] == [True, True, False]


def test_registers_that_feed_each_other_may_hold_what_either_starts_with() -> None:
    """Two pointers that a loop swaps: each store may go through both."""
    found = summary(
        "ld.param.u64 %rd2, [y]; mov.u64 %rd3, %rd1; mov.u64 %rd4, %rd2;\nLOOP: st.global.u32 [%rd3], 1;\n"
        "st.global.u32 [%rd4], 1; mov.u64 %rd5, %rd3; mov.u64 %rd3, %rd4; mov.u64 %rd4, %rd5;"
        "setp.lt.s32 %p1, %r2, 9; @%p1 bra LOOP;"
    )
    lines = sorted({site.line for site in found.sites})
    assert len(lines) == 2
    for line in lines:
        assert {site.parameter for site in found.sites if site.line == line} == {"x", "y"}


def test_conditions_joined_by_logic_and_negated() -> None:
    found = summary(
        "ld.param.u32 %r9, [n]; setp.lt.s32 %p1, %r1, 7; setp.gt.s32 %p2, %r2, %r9; and.pred %p3, %p1, %p2;"
        "@!%p3 st.global.u32 [%rd1], 1;"
    )
    assert only(found).condition == "(ctaid.x >= 7 or tid.x <= n)"
    skipped = summary("setp.ne.s32 %p1, %r2, 0; @%p1 bra END; st.global.u32 [%rd1], 1; END:")
    assert only(skipped).condition == "tid.x == 0"
    data = summary("ld.global.u32 %r3, [%rd1]; setp.ne.s32 %p1, %r3, 0; @%p1 st.global.u32 [%rd1], 1;")
    assert data.sites[1].condition == "what depends on data or control"


def test_an_index_from_memory_is_bounded_by_the_allocation_and_a_base_from_memory_by_nothing() -> None:
    found = summary(
        "ld.param.u64 %rd5, [y]; ld.global.u32 %r3, [%rd1]; mul.wide.s32 %rd2, %r3, 4; add.s64 %rd3, %rd5, %rd2;"
        "ld.global.u64 %rd6, [%rd3];\n st.global.u32 [%rd6+4], 1;"
    )
    bounds = [(site.parameter, site.bounded) for site in found.sites]
    assert bounds == [("x", True), ("y", False), (None, False)]
    assert len(found.fallbacks) == 2
    assert found.fallbacks[-1][0] == found.sites[-1].line and "any buffer" in found.fallbacks[-1][1]


def test_what_reaches_everything_is_a_fallback_with_its_line() -> None:
    found = summary("\nmystery.b32 %r3, [%rd1];")
    ((line, reason),) = found.fallbacks
    assert "mystery" in reason and line == 13


def test_a_structure_by_value_and_shared_memory() -> None:
    found = summary(
        "ld.param.v2.u64 {%rd2, %rd3}, [s+8]; shl.b64 %rd5, %rd3, 2; add.s64 %rd4, %rd2, %rd5;"
        "st.global.u32 [%rd4], 1; st.shared.u32 [%r2], 1;",
        ".param .u64 x, .param .align 8 .b8 s[24]",
    )
    site = only(found)
    assert (site.parameter, site.at) == ("s", "s[16:24]*4 + s[8:16]")
    assert [p.pointer for p in found.parameters] == [False, True]


def test_the_stored_kernels_have_forms() -> None:
    """Triton and nvcc text: every access of these has a parameter for a base, and none depends on data."""
    for stem in (
        "silu_multiply.sm_90",
        "rms_norm.sm_80",
        "softmax.sm_100",
        "rotary.sm_90",
        "strided_copy.sm_80",
    ):
        entry = module(stem).entries()[0].name
        found = summarise(module(stem), entry)
        assert found.sites and not found.fallbacks, stem
        assert all(site.parameter and site.bounded for site in found.sites), stem
    saxpy = summarise(module("strided.nvcc.sm_90"), "saxpy")
    assert saxpy.sites[0].at == "arg2 + 4*(ctaid.x*ntid.x + tid.x)"


expressions = st.recursive(
    st.one_of(
        st.integers(0, 40).map(lambda value: (symbolic.number(value), lambda t: value)),
        st.just((symbolic.atom("t", 0, 31), lambda t: t)),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(
            lambda p: (symbolic.add(p[0][0], p[1][0]), lambda t: p[0][1](t) + p[1][1](t))
        ),
        st.tuples(inner, st.integers(1, 16)).map(
            lambda p: (symbolic.multiply(p[0][0], symbolic.number(p[1])), lambda t: p[0][1](t) * p[1])
        ),
        st.tuples(inner, st.integers(0, 4)).map(
            lambda p: (symbolic.shift_right(p[0][0], p[1]), lambda t: p[0][1](t) >> p[1])
        ),
        st.tuples(inner, st.integers(0, 63)).map(
            lambda p: (symbolic.mask(p[0][0], p[1]), lambda t: p[0][1](t) & p[1])
        ),
        st.tuples(inner, st.integers(1, 20)).map(
            lambda p: (symbolic.remainder(p[0][0], p[1]), lambda t: p[0][1](t) % p[1])
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_simplified_expressions_mean_the_same(pair: tuple) -> None:  # type: ignore[type-arg]
    """The text, evaluated for every thread, against plain arithmetic; and the bounds hold."""
    expression, function = pair
    low, high = expression.bounds()
    possible = expression.possible_bits()
    text = expression.text().replace("/", "//")
    for thread in range(32):
        expected = function(thread)
        assert eval(text, {"t": thread}) == expected
        assert low is None or low <= expected
        assert high is None or expected <= high
        assert possible is None or expected & ~possible == 0


@settings(max_examples=200, deadline=None)
@given(expressions, expressions)
def test_or_is_a_sum_only_where_no_bit_meets(first: tuple, second: tuple) -> None:  # type: ignore[type-arg]
    joined = symbolic.join_bits(first[0], second[0])
    if joined is not None:
        text = joined.text().replace("/", "//")
        for thread in range(32):
            assert eval(text, {"t": thread}) == first[1](thread) | second[1](thread)
