"""Device functions, private memory and what passes through them: arguments, results, spills, arrays of pointers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from tessera_core.program.boxes import Box
from tessera_core.ptx import flatten
from tessera_core.ptx.parser import parse_module
from tests.ptx.launches import Pointer, launch_of
from tests.ptx.oracle.machine import observe
from tests.ptx.test_control_flow import LOAD, ROW, SIZES, analyse, kernel, only

WRITES = """
.func (.param .b32 result) at(.param .b64 place, .param .b32 index) {
    .reg .b32 %r<9>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [place]; ld.param.b32 %r1, [index];
    mul.wide.s32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r1;
    add.s32 %r2, %r1, 32; st.param.b32 [result], %r2; ret;
}"""
CALL = """{ .param .b64 a; .param .b32 b; .param .b32 r; st.param.b64 [a], %rd2; st.param.b32 [b], INDEX;
    call.uni (r), at, (a, b); ld.param.b32 %r2, [r]; }"""

REGISTERS = """
.func (.reg .b64 %sum) plus(.reg .b64 %x, .reg .b64 %y) { add.s64 %sum, %x, %y; ret; }"""

RECURSIVE = """
.func down(.param .b64 place, .param .b32 left) {
    .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [place]; ld.param.b32 %r1, [left];
    st.global.u32 [%rd1], %r1;
    setp.eq.s32 %p1, %r1, 0; @%p1 ret;
    add.s64 %rd2, %rd1, 128; sub.s32 %r2, %r1, 1;
    { .param .b64 a; .param .b32 b; st.param.b64 [a], %rd2; st.param.b32 [b], %r2; call.uni down, (a, b); }
    ret;
}"""

FIRST = (
    ".func first(.param .b64 q) { .reg .b64 %rd<3>; ld.param.b64 %rd1, [q]; st.global.u32 [%rd1], 1; ret; }"
)
SECOND = FIRST.replace("first", "second").replace("[%rd1]", "[%rd1+256]")


def test_a_function_writes_where_its_arguments_point_and_its_result_is_known() -> None:
    first, second = CALL.replace("INDEX", "%r1"), CALL.replace("INDEX", "%r2")
    result = analyse(kernel(f"{first} {second} ret;", WRITES))
    assert not result.fallbacks
    (write,) = result.accesses
    assert (write.must, write.boxes, write.precision) == (True, (Box(0, (), 256),), "exact")


def test_a_guarded_call_is_made_by_the_threads_of_its_guard_only() -> None:
    call = CALL.replace("INDEX", "%r1").replace("call.uni", "@%p1 call")
    result = analyse(kernel(f"setp.lt.u32 %p1, %r1, 8; {call} ret;", WRITES))
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes) == (True, (Box(0, (), 32),))


def test_arguments_and_results_in_registers() -> None:
    result = analyse(kernel("call (%rd6), plus, (%rd2, %rd3); st.global.u32 [%rd6], %r1; ret;", REGISTERS))
    (write,) = result.accesses
    assert (write.must, write.boxes, write.precision) == (True, ROW, "exact")


def test_recursion_is_followed_to_its_end_while_it_is_shallow() -> None:
    passed = "st.param.b64 [a], %rd5; st.param.b32 [b], %r9;"
    code = f"{{ .param .b64 a; .param .b32 b; {passed} call.uni down, (a, b); }} ret;"
    for depth in (0, 1, flatten.RECURSION_LIMIT - 1):
        result = analyse(kernel(code, RECURSIVE), n=depth)
        (write,) = result.accesses
        assert not result.fallbacks
        assert (write.must, write.boxes) == (True, (Box(0, (), 128 * (depth + 1)),))
    result = analyse(kernel(code, RECURSIVE), n=flatten.RECURSION_LIMIT + 2)
    assert not result.fallbacks and not only(result, 0, "write")
    sure, perhaps = only(result, 1, "write")
    assert (sure.must, sure.boxes) == (True, (Box(0, (), 128 * flatten.RECURSION_LIMIT),))
    assert (perhaps.must, perhaps.boxes, perhaps.precision) == (False, None, "bounded")
    assert (perhaps.reason, perhaps.line) == ("the address depends on data", 8)


@dataclass(frozen=True)
class Recursion:
    """``before``: functions, of which ``go(a, b, left) -> result`` is called by the kernel with its two pointers; with
    the result, a pointer, in %rd7 it then runs ``after``, as it ran ``start`` before. ``writes``: the buffers that may
    be written; None: any."""

    before: str
    writes: frozenset[int] | None
    after: str = ""
    start: str = ""

    def source(self) -> str:
        call = """{ .param .b64 x; .param .b64 y; .param .b32 z; .param .b64 r;
            st.param.b64 [x], %rd1; st.param.b64 [y], %rd2; st.param.b32 [z], %r9;
            call.uni (r), go, (x, y, z); ld.param.b64 %rd7, [r]; }"""
        return kernel(f"{self.start} {call} {self.after} ret;", self.before).text


def go(body: str, variables: str = "", name: str = "go", callee: str = "go") -> str:
    """A function of (a, b, left) in %rd1, %rd2 and %r1 that returns %rd9, at first a; ``CALL`` calls ``callee`` with
    %rd3, %rd4 and one less and puts its result into %rd5."""
    call = f"""{{ .param .b64 x; .param .b64 y; .param .b32 z; .param .b64 r; sub.s32 %r2, %r1, 1;
        st.param.b64 [x], %rd3; st.param.b64 [y], %rd4; st.param.b32 [z], %r2;
        call.uni (r), {callee}, (x, y, z); ld.param.b64 %rd5, [r]; }}"""
    head = f".func (.param .b64 result) {name}(.param .b64 a, .param .b64 b, .param .b32 left)"
    return f"""{head} {{
        .reg .pred %p<5>; .reg .b32 %r<9>; .reg .b64 %rd<20>; {variables}
        ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; ld.param.b32 %r1, [left];
        mov.b64 %rd9, %rd1; mov.b64 %rd3, %rd1; mov.b64 %rd4, %rd2; mov.u32 %r3, 0;
        setp.eq.s32 %p1, %r1, 0; @%p1 bra $END;
        {body.replace("CALL", call)}
        $END: st.param.b64 [result], %rd9; ret;
    }}"""


HEADS = "".join(
    f".func (.param .b64 result) {name}(.param .b64 a, .param .b64 b, .param .b32 left);"
    for name in ("go", "other")
)
CELL = ".local .align 8 .b8 cell[16];"
SWAPPED = "mov.b64 %rd3, %rd2; mov.b64 %rd4, %rd1;"
KEPT_CELL = """st.local.u64 [cell], %rd1; mov.b64 %rd10, cell; add.s64 %rd10, %rd10, 8;
    st.local.u64 [%rd10], %rd2; CALL ld.local.u64 %rd11, [cell+8]; st.global.u32 [%rd11], %r1;"""

RECURSIONS: Mapping[str, Recursion] = {
    "passed on unchanged": Recursion(go("ld.global.u32 %r3, [%rd1]; CALL st.global.u32 [%rd2], %r1;"), {1}),
    "swapped": Recursion(go(f"{SWAPPED} CALL st.global.u32 [%rd2], %r1;"), {0, 1}),
    "swapped, in the callee": Recursion(go(f"st.global.u32 [%rd2+8], %r1; {SWAPPED} CALL"), {0, 1}),
    "kept across the call": Recursion(
        go("setp.ne.s32 %p2, %r1, 8; @%p2 mov.b64 %rd1, %rd2; CALL st.global.u32 [%rd1], %r1;"), {0, 1}
    ),
    "three calls": Recursion(
        go("min.s32 %r1, %r1, 2; CALL CALL CALL st.global.u32 [%rd2], %r1;"),
        {1},
    ),
    "returned as passed": Recursion(go("CALL"), {0}, "st.global.u32 [%rd7], %r9;"),
    "returned from the deepest": Recursion(
        go(f"{SWAPPED} CALL mov.b64 %rd9, %rd5;"), {0, 1}, "st.global.u32 [%rd7], %r9;"
    ),
    "moved on the way back": Recursion(
        go("CALL add.s64 %rd9, %rd5, 64; st.global.u32 [%rd9], %r1;"), {0}, "st.global.u32 [%rd7+4], %r9;"
    ),
    "in a private variable": Recursion(go(KEPT_CELL, CELL), {1}),
    "in a private variable, swapped": Recursion(go(f"{SWAPPED} {KEPT_CELL}", CELL), {0, 1}),
    "two functions": Recursion(
        HEADS
        + go(f"{SWAPPED} CALL st.global.u32 [%rd2+16], %r1;", callee="other")
        + go("CALL st.global.u32 [%rd2], %r1;", name="other"),
        {0, 1},
    ),
    # the callee stores a pointer through its argument, and the caller loads it
    "stored by the callee, in private memory": Recursion(
        go("setp.ne.s32 %p2, %r1, 1; @%p2 bra $NEXT; st.u64 [%rd1], %rd2; $NEXT: CALL"),
        {0, 1},
        "ld.local.u64 %rd8, [place]; st.global.u32 [%rd8], %r9;",
        """.local .align 8 .b8 place[8]; mov.b64 %rd10, place; st.local.u64 [place], %rd1;
        cvta.local.u64 %rd1, %rd10;""",
    ),
    "stored by the callee, in a buffer": Recursion(
        go("CALL st.global.u64 [%rd1], %rd2;"), None, "ld.global.u64 %rd8, [%rd1]; st.global.u32 [%rd8], %r9;"
    ),
    "loaded from memory": Recursion(
        go("st.global.u64 [%rd1], %rd2; CALL ld.global.u64 %rd8, [%rd1]; st.global.u32 [%rd8+4], %r1;"), None
    ),
    "the argument is loaded from memory": Recursion(
        go("st.global.u64 [%rd1], %rd2; CALL ld.global.u64 %rd4, [%rd1]; CALL st.global.u32 [%rd2+4], %r1;"),
        None,
    ),
    # the address of a variable of one call in another one
    "a variable's address is passed": Recursion(
        go(
            """mov.b64 %rd10, cell; cvta.local.u64 %rd4, %rd10; CALL
            setp.ne.s64 %p2, %rd2, %rd4; @%p2 st.global.u32 [%rd1], %r1;""",
            CELL,
        ),
        None,
    ),
    "a variable's address is stored": Recursion(
        go(
            """mov.b64 %rd10, cell; cvta.local.u64 %rd11, %rd10; st.local.u64 [cell+8], %rd11; CALL
            st.global.u32 [%rd1], %r1;""",
            CELL,
        ),
        None,
    ),
}


def observed(source: str, n: int) -> dict[str, dict[int, list[int]]]:
    """What the emulator, which has a stack of calls, sees."""
    launch = launch_of(parse_module(source), "k", (1, 1, 1), (32, 1, 1), (Pointer(0), Pointer(1), n))
    stored = SimpleNamespace(
        **{name: getattr(launch, name) for name in ("entry", "grid", "block", "shared_bytes", "parameters")},
        relocations=tuple((r.offset, r.buffer, r.byte_offset) for r in launch.relocations),
        sizes=lambda: SIZES,
    )
    return observe(source, stored, lambda *_: {buffer: bytes(size) for buffer, size in SIZES.items()})


@pytest.mark.parametrize("depth", [flatten.RECURSION_LIMIT - 2, flatten.RECURSION_LIMIT + 3])
@pytest.mark.parametrize("name", RECURSIONS)
def test_recursion_of_any_depth_touches_no_more_than_is_claimed(name: str, depth: int) -> None:
    case = RECURSIONS[name]
    result = analyse(parse_module(case.source()), depth)
    deep = depth > flatten.RECURSION_LIMIT
    if deep and case.writes is None:
        assert result.fallbacks
    elif deep:
        assert not result.fallbacks
        assert {access.buffer for access in result.accesses if access.mode == "write"} == case.writes
    seen = observed(case.source(), depth)
    for mode in ("read", "write"):
        for buffer, size in SIZES.items():
            may, must, real = (np.zeros(size, dtype=np.bool_) for _ in range(3))
            for access in only(result, buffer, mode):
                for low, high in (
                    [(0, size)]
                    if access.boxes is None
                    else [edge for box in access.boxes for edge in box.intervals()]
                ):
                    may[low:high] = True
                    must[low:high] |= access.must
            runs = seen[mode].get(buffer, [])
            for low, high in zip(runs[::2], runs[1::2], strict=True):
                real[low:high] = True
            assert not (real & ~may).any(), (mode, buffer)
            assert mode == "read" or not (must & ~real).any(), (mode, buffer)


def test_an_indirect_call_may_be_to_each_function_of_its_list() -> None:
    call = "T: .calltargets first, second; { .param .b64 a; st.param.b64 [a], %rd5; call %rd7, (a), T; }"
    result = analyse(
        kernel(f"ld.global.u64 %rd7, [%rd1]; {call} st.global.u32 [%rd5+1024], 1; ret;", FIRST + SECOND)
    )
    assert not result.fallbacks
    sure, perhaps = only(result, 1, "write")
    assert (sure.must, sure.boxes) == (True, (Box(1024, (), 128),))
    assert (perhaps.must, perhaps.boxes) == (False, (Box(0, ((2, 256),), 128), Box(1024, (), 128)))


def test_an_indirect_call_without_a_list_reaches_everything() -> None:
    call = (
        "T: .callprototype _ (.param .b64 _); { .param .b64 a; st.param.b64 [a], %rd5; call %rd7, (a), T; }"
    )
    assert analyse(kernel(f"ld.global.u64 %rd7, [%rd1]; {call} ret;", FIRST)).fallbacks


EXTERN = """
.extern .func __assertfail(.param .b64 a) .noreturn;
.extern .func (.param .b64 r) malloc(.param .b64 a);
.extern .func free(.param .b64 a);
.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);
.local .align 8 .b8 t[64];
.global .b8 format[8];
"""


@pytest.mark.parametrize(
    "code",
    [
        f"{LOAD} @%p1 bra $OK; {{ .param .b64 a; call.uni __assertfail, (a); }} $OK:",
        "{ .param .b64 a; .param .b64 b; .param .b32 r; st.local.u32 [t], %r1; mov.b64 %rd7, t;"
        " st.param.b64 [b], %rd7; call.uni (r), vprintf, (a, b); }",
        "{ .param .b64 a; .param .b64 r; call.uni (r), malloc, (a); ld.param.b64 %rd7, [r]; }"
        " st.u32 [%rd7], %r1; ld.u32 %r2, [%rd7]; { .param .b64 a; call.uni free, (a); }",
    ],
)
def test_functions_of_the_device_runtime_touch_no_buffer(code: str) -> None:
    result = analyse(kernel(f"{code} st.global.u32 [%rd5], %r1; ret;", EXTERN))
    assert not result.fallbacks
    assert not any(access.buffer == 0 and access.mode == "write" for access in result.accesses)
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes, write.precision) == (True, ROW, "exact")


def test_a_string_that_may_be_printed_is_read() -> None:
    code = "{ .param .b64 a; .param .b64 b; .param .b32 r; st.local.u64 [t], %rd1; mov.b64 %rd7, t;"
    code += " st.param.b64 [b], %rd7; call.uni (r), vprintf, (a, b); }"
    result = analyse(kernel(f"{code} ret;", EXTERN))
    assert not result.fallbacks
    assert {(a.buffer, a.mode, a.must, a.boxes) for a in result.accesses if a.buffer == 0} == {
        (0, "read", False, None)
    }


DEPOT = ".local .align 16 .b8 depot[128];"


@pytest.mark.parametrize(
    "code",
    [
        "st.local.u64 [depot+8], %rd5; ld.local.u64 %rd6, [depot+8];",
        "mov.u64 %rd7, depot; cvta.local.u64 %rd8, %rd7; st.u64 [%rd8+16], %rd5; ld.u64 %rd6, [%rd8+16];",
        "mov.b64 {%r2, %r3}, %rd5; st.local.u32 [depot], %r2; st.local.u32 [depot+4], %r3; ld.local.u64 %rd6, [depot];",
        "st.local.u64 [depot], %rd5; ld.local.v2.u32 {%r2, %r3}, [depot]; mov.b64 %rd6, {%r2, %r3};",
        "st.local.v2.u64 [depot], {%rd4, %rd5}; ld.local.u64 %rd6, [depot+8];",
        "st.local.v2.u64 [depot], {%rd4, %rd5}; mov.u64 %rd7, depot; and.b32 %r2, %r1, 0; cvt.u64.u32 %rd8, %r2;"
        " add.s64 %rd8, %rd8, %rd7; ld.local.u64 %rd6, [%rd8+8];",
        # each thread at a place of its own
        "and.b32 %r2, %r1, 7; mul.wide.u32 %rd7, %r2, 8; mov.u64 %rd8, depot; add.s64 %rd8, %rd8, %rd7;"
        " st.local.u64 [%rd8], %rd5; ld.local.u64 %rd6, [%rd8];",
        # an index is spilled, narrow and with its sign
        "neg.s32 %r2, %r1; st.local.u8 [depot+3], %r2; ld.local.s8 %r3, [depot+3]; neg.s32 %r3, %r3;"
        " mul.wide.s32 %rd7, %r3, 4; add.s64 %rd6, %rd2, %rd7;",
        # what was there before stays for the threads that do not store
        "st.local.u64 [depot], %rd4; setp.lt.u32 %p1, %r1, 99; @%p1 st.local.u64 [depot], %rd5;"
        " ld.local.u64 %rd6, [depot];",
        # a loop that counts in memory
        "st.local.u64 [depot], %rd2; st.local.u32 [depot+8], 0;"
        "$L: ld.local.u32 %r2, [depot+8]; setp.ge.u32 %p1, %r2, %r1; @%p1 bra $E;"
        " ld.local.u64 %rd7, [depot]; add.s64 %rd7, %rd7, 4; st.local.u64 [depot], %rd7;"
        " add.s32 %r2, %r2, 1; st.local.u32 [depot+8], %r2; bra.uni $L;"
        "$E: ld.local.u64 %rd6, [depot];",
    ],
)
def test_private_memory_holds_what_was_stored_there(code: str) -> None:
    result = analyse(kernel(f"{code} st.global.u32 [%rd6], %r1; ret;", DEPOT))
    assert not result.fallbacks and not only(result, 0, "write")
    (write,) = only(result, 1, "write")
    assert (write.must, write.boxes, write.precision) == (True, ROW, "exact")


@pytest.mark.parametrize(
    "code",
    [
        # an index from memory, into an array of two pointers
        "st.local.v2.u64 [depot], {%rd4, %rd5}; ld.global.u32 %r2, [%rd4]; and.b32 %r2, %r2, 1;"
        " mul.wide.u32 %rd7, %r2, 8; mov.u64 %rd8, depot; add.s64 %rd8, %rd8, %rd7; ld.local.u64 %rd6, [%rd8];",
        # a store that may have gone there
        "st.local.v2.u64 [depot], {%rd4, %rd4}; ld.global.u32 %r2, [%rd4]; and.b32 %r2, %r2, 1;"
        " mul.wide.u32 %rd7, %r2, 8; mov.u64 %rd8, depot; add.s64 %rd8, %rd8, %rd7; st.local.u64 [%rd8], %rd5;"
        " ld.local.u64 %rd6, [depot];",
        f"{LOAD} st.local.u64 [depot], %rd4; @%p1 st.local.u64 [depot], %rd5; ld.local.u64 %rd6, [depot];",
    ],
)
def test_a_place_in_private_memory_that_depends_on_data_means_all_pointers_there(code: str) -> None:
    result = analyse(kernel(f"{code} st.global.u32 [%rd6], %r1; ret;", DEPOT))
    assert not result.fallbacks
    for buffer in (0, 1):
        (write,) = only(result, buffer, "write")
        assert (write.must, write.boxes) == (False, ROW)
