"""What an analysis may cost: time and memory of one launch stay bounded however many blocks, groups and rounds it has,
and what is given up for that is given up on the safe side."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping

import pytest

from tessera_core.program.boxes import Box
from tessera_core.ptx import analysis, footprint, interpreter
from tessera_core.ptx.analysis import LaunchAnalysis, analyse_launch
from tessera_core.ptx.kernel import kernel_of
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.summary import summarise
from tessera_core.ptx.syntax import Module
from tests.ptx.launches import Pointer, claimed, launch_of

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"

# out[block * rows + i][thread] for i up to the block's row in its matrix, as causal attention walks
TRIANGLE = """
    ld.param.u64 %rd1, [p0]; ld.param.u32 %r1, [rows];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y;
    mad.lo.s32 %r5, %r4, %r1, 0; mul.wide.u32 %rd2, %r5, 512; add.s64 %rd3, %rd1, %rd2;
    mul.wide.u32 %rd4, %r2, 4; add.s64 %rd5, %rd3, %rd4; mov.u32 %r6, 0;
    $L: st.global.u32 [%rd5], %r6; add.s64 %rd5, %rd5, 512; add.s32 %r6, %r6, 1;
    setp.le.u32 %p1, %r6, %r3; @%p1 bra $L; ret;"""

# Every row of blocks takes another way, which costs a group of blocks each.
WAYS = """
    ld.param.u64 %rd1, [p0]; mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x;
    mad.lo.s32 %r5, %r3, 128, %r2; mul.wide.u32 %rd2, %r5, 4; add.s64 %rd3, %rd1, %rd2; mov.u32 %r6, 0;
    $L: add.s32 %r6, %r6, 1; mul.lo.s32 %r7, %r6, 500; setp.lt.s32 %p1, %r5, %r7; @%p1 st.global.u32 [%rd3], %r6;
    setp.lt.s32 %p2, %r6, 40; @%p2 bra $L; ret;"""


def kernel(body: str) -> Module:
    return parse_module(
        f"""{HEAD}.visible .entry k(.param .u64 p0, .param .u32 rows) {{
            .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; {body}
        }}"""
    )


def analyse(parsed: Module, grid: tuple[int, int, int], rows: int, size: int) -> LaunchAnalysis:
    launch = launch_of(parsed, "k", grid, (128, 1, 1), (Pointer(0), rows))
    return analyse_launch(parsed, launch, {0: size})


def written(result: LaunchAnalysis) -> Mapping[bool, tuple[Box, ...] | None]:
    return {a.must: a.boxes for a in result.accesses if a.mode == "write"}


def test_blocks_that_leave_a_loop_one_after_the_other_do_not_lay_registers_out_for_all_threads() -> None:
    rows, heads = 64, 64
    parsed = kernel(TRIANGLE)
    tracemalloc.start()
    try:
        result = analyse(parsed, (rows, heads, 1), rows, rows * heads * 512)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written(result) == {True: (Box(0, (), rows * heads * 512),)}
    assert peak < 64 << 20  # a register laid out takes 4 MB, and every round keeps several


def test_all_groups_of_blocks_share_one_budget_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = analyse(kernel(WAYS), (160, 1, 1), 0, 160 * 512)
    spent = 0
    run = interpreter.Interpreter.run

    def counted(self: interpreter.Interpreter) -> footprint.Footprint:
        nonlocal spent
        try:
            return run(self)
        finally:
            spent += self.spent

    monkeypatch.setattr(interpreter.Interpreter, "run", counted)
    monkeypatch.setattr(analysis, "LAUNCH_STEPS_LIMIT", 900)
    loose = analyse(kernel(WAYS), (160, 1, 1), 0, 160 * 512)
    # the group that exceeds it may widen its loop, and one more interpretation takes in the blocks that are left
    assert spent < 2500
    assert loose.split.reason == "too many blocks to tell apart" and not loose.block_footprints
    sizes = {0: 160 * 512}
    for must, more, less in (
        (False, loose, exact),
        (True, exact, loose),
    ):  # nothing is missed, nothing more is sure
        assert not (claimed(less, sizes, "write", must)[0] & ~claimed(more, sizes, "write", must)[0]).any()


def chain(length: int, registers: int = 3, calls: int = 1) -> str:
    """Device functions that each call the next one, and a kernel that calls the first."""
    functions = [f".func f{i}(.param .b64 a);" for i in range(length)]
    for i in range(length):
        inner = f"{{ .param .b64 q; st.param.b64 [q], %rd1; call.uni f{i + 1}, (q); }} "
        work = inner * calls if i + 1 < length else "st.global.u32 [%rd1], 1;"
        functions.append(
            f".func f{i}(.param .b64 a) {{ .reg .b64 %rd<{registers}>; ld.param.b64 %rd1, [a]; {work} ret; }}"
        )
    return (
        HEAD
        + "\n".join(functions)
        + "\n.visible .entry k(.param .u64 p0, .param .u32 rows) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [p0];"
        + " { .param .b64 q; st.param.b64 [q], %rd1; call.uni f0, (q); } ret; }"
    )


@pytest.mark.parametrize(
    ("length", "registers", "calls"),
    [(400, 3, 1), (2000, 3, 1), (16, 4000, 2)],
    ids=["deep", "deeper", "wide"],
)
def test_calls_beyond_any_measure_stay_calls(length: int, registers: int, calls: int) -> None:
    parsed = parse_module(chain(length, registers, calls))
    result = analyse(parsed, (1, 1, 1), 0, 4096)
    assert len(kernel_of(parsed, "k").flow.steps) < 5_000
    (reason,) = result.fallbacks
    assert reason.startswith("a called function may touch what it can reach (line ")
    assert {(a.mode, a.boxes) for a in result.accesses if not a.must} == {("read", None), ("write", None)}


def test_short_chains_of_calls_are_followed() -> None:
    result = analyse(parse_module(chain(40)), (1, 1, 1), 0, 4096)
    assert written(result) == {True: (Box(0, (), 4),)} and not result.fallbacks


def test_a_kernel_of_thousands_of_branches_is_summarised_without_saying_which_decide() -> None:
    body = "".join(
        f"setp.eq.s32 %p1, %r1, {i}; @%p1 bra $L{i}; st.global.u32 [%rd1+{4 * i}], %r1; $L{i}: "
        for i in range(1500)
    )
    found = summarise(kernel(f"ld.param.u64 %rd1, [p0]; ld.param.u32 %r1, [rows]; {body} ret;"), "k")
    assert len(found.sites) == 1500
    assert {site.condition for site in found.sites} == {"what depends on data or control"}
