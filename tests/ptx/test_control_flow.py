"""Branches, loops and pointers whose course depends on data, in small hand-written kernels, and the same answers'
soundness when every limit that trades precision for time is hit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tessera_core.program.boxes import Box
from tessera_core.ptx import analysis, footprint, interpreter, predicates, values
from tessera_core.ptx.analysis import LaunchAnalysis, PtxAccess, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module
from tests.ptx.launches import Pointer, launch_of, module
from tests.ptx.test_exactness import EXACT, EXACT_NVCC, Builder, check, gather, row_sum

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
SIZES = {0: 4096, 1: 4096}


def kernel(body: str, before: str = "") -> Module:
    """A module with one kernel of two pointers; %rd1 and %rd2 hold them, %r1 the thread, %rd3 its 4-byte offset."""
    return parse_module(
        f"""{HEAD}{before}
        .visible .entry k(.param .u64 p0, .param .u64 p1, .param .u32 n) {{
            .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
            ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u32 %r9, [n];
            mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
            add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
            {body}
        }}"""
    )


def analyse(parsed: Module, n: int = 0) -> LaunchAnalysis:
    launch = launch_of(parsed, "k", (1, 1, 1), (32, 1, 1), (Pointer(0), Pointer(1), n))
    return analyse_launch(parsed, launch, SIZES)


def only(result: LaunchAnalysis, buffer: int, mode: str) -> list[PtxAccess]:
    return [access for access in result.accesses if access.buffer == buffer and access.mode == mode]


ROW = (Box(0, (), 128),)
LOAD = "ld.global.u32 %r2, [%rd4]; setp.eq.u32 %p1, %r2, 0;"


def test_a_write_behind_a_data_dependent_branch_is_not_sure_but_one_after_the_paths_meet_is() -> None:
    parsed = kernel(
        f"{LOAD} @%p1 bra $SKIP; st.global.u32 [%rd5], %r2; $SKIP: st.global.u32 [%rd5+512], %r2; ret;"
    )
    (sure, perhaps) = only(analyse(parsed), 1, "write")
    assert (sure.must, sure.boxes) == (True, (Box(512, (), 128),))
    assert (perhaps.must, perhaps.boxes) == (False, (Box(0, ((2, 512),), 128),))


def test_a_data_dependent_guard_makes_an_access_possible_only() -> None:
    parsed = kernel(f"{LOAD} @%p1 st.global.u32 [%rd5], %r2; ret;")
    (write,) = only(analyse(parsed), 1, "write")
    assert (write.must, write.boxes, write.precision) == (False, ROW, "exact")


def test_threads_that_may_have_left_do_not_write_for_sure() -> None:
    parsed = kernel(f"{LOAD} @%p1 exit; st.global.u32 [%rd5], %r2; ret;")
    (write,) = only(analyse(parsed), 1, "write")
    assert (write.must, write.boxes) == (False, ROW)


def test_a_failed_assertion_ends_the_launch_so_what_follows_is_sure() -> None:
    parsed = kernel(f"{LOAD} @%p1 bra $BAD; st.global.u32 [%rd5], %r2; ret; $BAD: trap;")
    (write,) = only(analyse(parsed), 1, "write")
    assert (write.must, write.boxes) == (True, ROW)


def test_a_register_written_on_one_of_two_paths_may_have_either_value() -> None:
    parsed = kernel(
        f"""{LOAD} mov.u64 %rd6, 0; @!%p1 bra $J; mov.u64 %rd6, 256;
        $J: add.s64 %rd7, %rd5, %rd6; st.global.u32 [%rd7], %r2; ret;"""
    )
    (write,) = only(analyse(parsed), 1, "write")
    assert not write.must and write.boxes is not None
    assert write.boxes[0].low == 0 and write.boxes[-1].high == 256 + 128


def test_a_loop_whose_end_is_in_memory_covers_the_allocation_and_what_follows_is_sure() -> None:
    parsed = kernel(
        f"""{LOAD} mov.u32 %r3, 0; mov.u64 %rd6, %rd4;
        $LOOP: ld.global.u32 %r5, [%rd6]; add.s64 %rd6, %rd6, 128; add.s32 %r3, %r3, 1;
        setp.lt.s32 %p2, %r3, %r2; @%p2 bra $LOOP;
        st.global.u32 [%rd5], %r3; ret;"""
    )
    result = analyse(parsed)
    assert any(access.boxes is None for access in only(result, 0, "read"))
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes) == (True, ROW)


def test_a_spin_on_memory_ends() -> None:
    parsed = kernel(
        "$WAIT: ld.global.u32 %r2, [%rd1]; setp.ne.u32 %p1, %r2, 0; @%p1 bra $WAIT; st.global.u32 [%rd5], %r2; ret;"
    )
    (write,) = only(analyse(parsed), 1, "write")
    assert (write.must, write.boxes) == (True, ROW)


def test_a_loop_with_known_trips_is_exact() -> None:
    parsed = kernel(
        """mov.u32 %r3, 0;
        $LOOP: st.global.u32 [%rd5], %r3; add.s64 %rd5, %rd5, 1024; add.s32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, %r9; @%p2 bra $LOOP; ret;"""
    )
    (write,) = only(analyse(parsed, 3), 1, "write")
    assert (write.must, write.boxes) == (True, (Box(0, ((3, 1024),), 128),))


def test_every_way_back_of_a_jump_table_is_followed() -> None:
    code = """
        T: .branchtargets $A, $B, $E;
        bra $S;
        $A: st.global.u32 [%rd5+128], %r1; bra $S;
        $B: st.global.u32 [%rd5+256], %r1; bra $S;
        $S: ld.global.u32 %r2, [%rd4]; brx.idx %r2, T;
        $E: ret;"""
    writes = only(analyse(kernel(code)), 1, "write")
    assert max(box.high for write in writes for box in write.boxes or ()) == 384


def test_what_a_reducing_barrier_finds_is_not_known() -> None:
    code = """
        mov.u32 %r2, 0; setp.eq.u32 %p1, %r2, 0; bar.red.popc.u32 %r2, 0, %p1;
        mul.wide.u32 %rd6, %r2, 4; add.s64 %rd6, %rd6, %rd5; st.global.u32 [%rd6], %r1; ret;"""
    (write,) = only(analyse(kernel(code)), 1, "write")
    assert not write.must and write.precision == "bounded"


def test_one_of_two_pointers_means_both_buffers() -> None:
    parsed = kernel(f"{LOAD} selp.b64 %rd6, %rd4, %rd5, %p1; st.global.u32 [%rd6], %r2; ret;")
    result = analyse(parsed)
    for buffer in SIZES:
        (write,) = only(result, buffer, "write")
        assert (write.must, write.boxes, write.precision) == (False, ROW, "bounded")


SPLIT = "mov.b64 {%r2, %r3}, %rd5;"
TAG = "or.b64 %rd6, %rd5, 2;"


@pytest.mark.parametrize(
    "code",
    [
        f"{SPLIT} mov.b64 %rd6, {{%r2, %r3}};",
        f"{SPLIT} cvt.u64.u32 %rd7, %r2; cvt.u64.u32 %rd8, %r3; shl.b64 %rd9, %rd8, 32; or.b64 %rd6, %rd7, %rd9;",
        f"{SPLIT} cvt.u64.u32 %rd7, %r2; cvt.u64.u32 %rd8, %r3; bfi.b64 %rd6, %rd8, %rd7, 32, 32;",
        f"{SPLIT} prmt.b32 %r4, %r2, %r3, 0x6543; prmt.b32 %r5, %r4, %r2, 0x2104; prmt.b32 %r7, %r3, %r4, 0x3654;"
        " prmt.b32 %r6, %r2, %r5, 0x3214; prmt.b32 %r6, %r2, %r2, 0x3210; mov.b64 %rd6, {%r6, %r3};",
        f"{SPLIT} mov.b32 {{%rs1, %rs2}}, %r2; mov.b32 %r4, {{%rs1, %rs2}}; mov.b64 %rd6, {{%r4, %r3}};",
        f"{SPLIT} shf.l.wrap.b32 %r4, %r2, %r3, 8; shf.r.wrap.b32 %r5, %r4, %r2, 0; shl.b32 %r6, %r2, 8;"
        " shf.r.wrap.b32 %r7, %r6, %r4, 8; shr.u32 %r5, %r3, 24; shl.b32 %r5, %r5, 24;"
        " bfe.u32 %r8, %r3, 0, 24; or.b32 %r5, %r5, %r8; mov.b64 %rd6, {%r7, %r5};",
        "cvt.u32.u64 %r2, %rd5; shr.u64 %rd7, %rd5, 32; cvt.u32.u64 %r3, %rd7; mov.b64 %rd6, {%r2, %r3};",
        f"{TAG} and.b64 %rd6, %rd6, -4;",
        f"{TAG} xor.b64 %rd6, %rd6, 2;",
        f"{TAG} and.b64 %rd7, %rd6, 3; sub.s64 %rd6, %rd6, %rd7;",
        f"{TAG} shr.u64 %rd6, %rd6, 2; shl.b64 %rd6, %rd6, 2;",
        "and.b64 %rd7, %rd5, 0xffffffff; and.b64 %rd8, %rd5, 0xffffffff00000000; add.s64 %rd6, %rd7, 0;"
        " or.b64 %rd6, %rd7, %rd8;",
        "mov.b128 %rq1, {%rd4, %rd5}; mov.b128 {%rd7, %rd6}, %rq1;",
        f"{SPLIT} shfl.sync.bfly.b32 %r2, %r2, 3, 31, -1; shfl.sync.bfly.b32 %r3, %r3, 3, 31, -1;"
        " mov.b64 %rd6, {%r2, %r3};",
    ],
)
def test_a_pointer_taken_apart_and_rejoined_is_whole(code: str) -> None:
    parsed = kernel(f".reg .b16 %rs<4>; .reg .b128 %rq<4>; {code} st.global.u32 [%rd6], %r1; ret;")
    result = analyse(parsed)
    assert not only(result, 0, "write") and not result.fallbacks
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes, write.precision) == (True, ROW, "exact")


@pytest.mark.parametrize(
    "code",
    [
        f"{SPLIT} add.cc.u32 %r2, %r2, 64; addc.u32 %r3, %r3, 0; mov.b64 %rd6, {{%r2, %r3}};",
        f"{SPLIT} {LOAD} xor.b32 %r3, %r3, %r2; mov.b64 %rd6, {{%r2, %r3}};",
        "and.b64 %rd6, %rd5, -4096;",
    ],
)
def test_a_pointer_that_is_computed_with_keeps_its_buffer(code: str) -> None:
    result = analyse(kernel(f"{code} st.global.u32 [%rd6], %r1; ret;"))
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes, write.precision) == (False, None, "bounded")
    assert not only(result, 0, "write")


@pytest.mark.parametrize(
    "code",
    [
        "ld.param.u32 %r2, [p1]; ld.param.u32 %r3, [p1+4]; mov.b64 %rd6, {%r2, %r3};",
        "ld.param.v2.u32 {%r2, %r3}, [p1]; mov.b64 %rd6, {%r2, %r3};",
        "ld.param.u32 %rd7, [p1]; ld.param.u32 %rd8, [p1+4]; bfi.b64 %rd6, %rd8, %rd7, 32, 32;",
    ],
)
def test_a_pointer_that_is_loaded_in_halves_is_whole(code: str) -> None:
    result = analyse(kernel(f"{code} add.s64 %rd6, %rd6, %rd3; st.global.u32 [%rd6], %r1; ret;"))
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes, write.precision) == (True, ROW, "exact")


SHARED = ".extern .shared .align 16 .b8 s[];"
EXCHANGE = (
    "mov.b32 %r6, s; shl.b32 %r2, %r1, 3; add.s32 %r3, %r2, s; xor.b32 %r4, %r2, 8; add.s32 %r5, %r4, s;"
)


@pytest.mark.parametrize(
    "code",
    [
        f"{EXCHANGE} st.shared.b64 [%r3], %rd5; bar.sync 0; ld.shared.b64 %rd6, [%r5];",
        f"{EXCHANGE} {SPLIT} st.shared.v2.b32 [%r6], {{%r2, %r3}}; bar.sync 0; ld.shared.b64 %rd7, [%r6];"
        " mov.b64 %rd6, %rd5;",
        "setp.eq.s32 %p1, %r1, 0; @%p1 bra $ONE; bra.uni $ALL; $ONE: st.shared.b64 [s], %rd2;"
        " $ALL: bar.sync 0; ld.shared.b64 %rd7, [s]; add.s64 %rd6, %rd7, %rd3;",
        "setp.eq.s32 %p1, %r1, 5; @%p1 st.shared.b32 [s+4], %r1; bar.sync 0; ld.shared.b32 %r2, [s+4];"
        " sub.s32 %r2, %r2, 5; mul.wide.s32 %rd7, %r2, 4; add.s64 %rd6, %rd5, %rd7;",
        "cvt.u16.u32 %rs1, %r1; mul.wide.u32 %rd7, %r1, 2; mov.b64 %rd8, s; add.s64 %rd8, %rd8, %rd7;"
        " st.shared.u16 [%rd8], %rs1; bar.sync 0; ld.shared.u16 %r2, [%rd8]; mul.wide.u32 %rd7, %r2, 4;"
        " add.s64 %rd6, %rd2, %rd7;",
    ],
)
def test_what_threads_hand_to_each_other_through_shared_memory_is_known(code: str) -> None:
    result = analyse(kernel(f".reg .b16 %rs<4>; {code} st.global.u32 [%rd6], %r1; ret;", SHARED))
    assert not result.fallbacks and not only(result, 0, "write")
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes, write.precision) == (True, ROW, "exact")


@pytest.mark.parametrize(
    "code",
    [
        f"{EXCHANGE} st.shared.b64 [%r3], %rd5; bar.sync 0; st.shared.b32 [%r3], %r1; ld.shared.b64 %rd6, [%r5];",
        f"{EXCHANGE} {LOAD} @%p1 bra $A; st.shared.b64 [s], %rd5; bar.sync 0; $A: ld.shared.b64 %rd6, [s];",
        f"{EXCHANGE} {LOAD} @%p1 bra $A; st.volatile.shared.b64 [s], %rd5; $A: ld.shared.b64 %rd6, [s];",
        f"{EXCHANGE} st.shared.b64 [%r3], %rd5; atom.shared.add.u32 %r2, [%r3], 8; ld.shared.b64 %rd6, [%r3];",
        f"{EXCHANGE} st.shared.b64 [s], 8; bar.sync 0; st.bulk.weak.shared::cta [s], 64, 0; bar.sync 0;"
        " ld.shared.b64 %rd7, [s]; add.s64 %rd6, %rd5, %rd7;",
        f"{EXCHANGE} st.shared.b64 [s], 8; bar.sync 0;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [s], %rd3, [%r6+64]; bar.sync 0;"
        " ld.shared.b64 %rd7, [s]; add.s64 %rd6, %rd5, %rd7;",
    ],
)
def test_what_may_have_been_overwritten_in_shared_memory_is_not(code: str) -> None:
    result = analyse(kernel(f"{code} st.global.u32 [%rd6], %r1; ret;", SHARED))
    assert not any(access.must for access in only(result, 1, "write"))


@pytest.mark.parametrize("build", ["sm_80", "sm_90", "sm_100"])
def test_an_atomic_behind_a_layout_change_touches_its_own_buffer_only(build: str) -> None:
    parsed = module(f"scatter_add.{build}")
    arguments = (Pointer(0), Pointer(1), Pointer(2), 500)
    launch = launch_of(parsed, "scatter_add", (2, 1, 1), (128, 1, 1), arguments)
    result = analyse_launch(parsed, launch, {0: 2000, 1: 2000, 2: 4096})
    assert not result.fallbacks
    assert {(a.buffer, a.mode, a.must, a.boxes) for a in result.accesses} == {
        (0, "read", True, (Box(0, (), 2000),)),
        (1, "read", True, (Box(0, (), 2000),)),
        (2, "read", False, None),
        (2, "write", False, None),
    }


def test_a_jump_table_may_go_anywhere_in_it() -> None:
    parsed = kernel(
        """ld.global.u32 %r2, [%rd4]; $T: .branchtargets $A, $B; brx.idx %r2, $T;
        $A: st.global.u32 [%rd5], %r1; bra $END;
        $B: st.global.u32 [%rd5+512], %r1;
        $END: st.global.u32 [%rd5+1024], %r1; ret;"""
    )
    (sure, perhaps) = only(analyse(parsed), 1, "write")
    assert (sure.must, sure.boxes) == (True, (Box(1024, (), 128),))
    assert (perhaps.must, perhaps.boxes) == (False, (Box(0, ((3, 512),), 128),))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("mov.u64 %rd6, 0; st.global.u32 [%rd6], %r1; ret;", "null pointer"),
        ("ld.global.u64 %rd6, [%rd1]; ld.global.u32 %r2, [%rd6]; ret;", "not a parameter"),
        ("frobnicate.global.u32 %r2, [%rd5]; ret;", "unknown opcode frobnicate.global.u32"),
        ("st.shared.u64 [s], %rd5; ld.shared.u64 %rd6, [s+8]; st.u32 [%rd6], %r1; ret;", "not a parameter"),
        (
            "@%p9 bra $A; st.shared.u64 [s], %rd5; $A: ld.shared.u64 %rd6, [s]; st.u32 [%rd6], %r1; ret;",
            "not a param",
        ),
        (
            "ld.global.u64 %rd8, [%rd1]; st.local.u64 [t], %rd5; st.u32 [%rd8], %r1; ld.local.u64 %rd6, [t];"
            " st.global.u32 [%rd6], %r1; ret;",
            "not a parameter",
        ),
        ("call.uni f, (%rd5); ret;", "called function"),
        ("tex.1d.v4.f32.s32 {%r2, %r3, %r4, %r5}, [p0, {%r1}]; ret;", "texture"),
    ],
)
def test_what_cannot_be_tied_down_touches_everything_and_says_why(body: str, reason: str) -> None:
    parsed = kernel(body, ".shared .align 8 .b8 s[64];\n.local .b8 t[64];\n.func f(.param .u64 q);")
    result = analyse(parsed)
    for buffer in SIZES:
        for mode in ("read", "write"):
            assert [a.precision for a in only(result, buffer, mode) if not a.must] == ["fallback"]
    assert len(result.fallbacks) == 1 and reason in result.fallbacks[0]
    line = next(a.line for a in result.accesses if a.precision == "fallback")
    assert line == next(i for i, text in enumerate(parsed.text.split("\n"), 1) if body in text)


def test_unknown_opcodes_are_counted() -> None:
    assert analyse(kernel("frobnicate.global.u32 %r2, [%rd5]; ret;")).unknown_opcodes == (
        "frobnicate.global.u32",
    )


@pytest.mark.parametrize(
    ("body", "reads", "writes"),
    [
        ("ld.global.u32 %r2, [%rd6];", True, False),
        ("st.global.u32 [%rd6], %r1;", False, True),
        ("red.global.add.u32 [%rd6], 1;", True, True),
        ("ld.global.u64 %rd7, [%rd5]; add.s64 %rd6, %rd6, %rd7; st.global.u32 [%rd6], %r1;", False, True),
    ],
)
def test_module_variables_are_told_from_buffers(body: str, reads: bool, writes: bool) -> None:
    result = analyse(kernel(f"mov.u64 %rd6, g; {body} ret;", ".global .align 4 .u32 g;"))
    assert all(access.mode == "read" for access in result.accesses)
    assert any("module variable g is read" in reason for reason in result.fallbacks) == reads
    assert [name for name, _ in result.written_variables] == (["g"] if writes else [])


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    owner, name, value = request.param
    analysis._remembered.cache_clear()
    monkeypatch.setattr(owner, name, value)
    yield
    analysis._remembered.cache_clear()


LIMITS = [
    pytest.param((interpreter, "STEPS_LIMIT", 40), id="steps"),
    pytest.param((analysis, "BLOCKS_LIMIT", 0), id="blocks"),
    pytest.param((analysis, "GROUPS_LIMIT", 1), id="groups"),
    pytest.param((values, "DENSE_ELEMENTS_LIMIT", 64), id="dense"),
    pytest.param((predicates, "DIVIDE_ELEMENTS", 1), id="divide"),
    pytest.param((analysis, "LAUNCH_STEPS_LIMIT", 60), id="launch-steps"),
    pytest.param((analysis, "KEPT_BYTES_LIMIT", 100), id="kept-bytes"),
    pytest.param((footprint, "KEPT_LIMIT", 10), id="kept"),
]


@pytest.mark.parametrize("limits", LIMITS, indirect=True)
@pytest.mark.parametrize("builder", [*EXACT, row_sum])
def test_triton_kernels_stay_sound_at_every_limit(limits: None, builder: Builder) -> None:
    parsed = module(f"{builder.__name__}.sm_90")
    check(parsed, builder(parsed, lambda low, high: (low + 2 * high) // 3), exact=False)


@pytest.mark.parametrize("limits", LIMITS, indirect=True)
@pytest.mark.parametrize("builder", [*EXACT_NVCC, gather])
def test_nvcc_kernels_stay_sound_at_every_limit(limits: None, builder: Builder) -> None:
    parsed = module("strided.nvcc.sm_100")
    check(parsed, builder(parsed, lambda low, high: (low + 2 * high) // 3), exact=False)
