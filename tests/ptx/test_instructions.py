"""Every transfer function against its definition, thread by thread: exact on known numbers, never wrong on bounded
ones, and indispensable (without its entry in the registry a result would be less than exact). Of exchanges within
warps, which `test_warp.py` checks, only the latter.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tessera_core.ptx import execution, semantics, warp
from tessera_core.ptx.execution import Threads
from tessera_core.ptx.kernel import kernel_of
from tessera_core.ptx.values import (
    ALWAYS,
    NUMBER,
    ZERO,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    constant,
    known,
    wrap,
)
from tests.ptx.launches import Pointer, launch_of
from tests.ptx.reference import INSTRUCTIONS, signed
from tests.ptx.test_control_flow import kernel

BLOCKS, THREADS = 3, 8
SHAPE = Shape(BLOCKS, THREADS, False)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

CORNERS = [
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    4095,
    65535,
    1 << 31,
    (1 << 32) - 1,
]
CORNERS += [0x5410, 0x7632, 0x3210, 0xBA98, 1 << 63, (1 << 64) - 1, (1 << 63) - 1, 0x123456789ABCDEF0, 20, 24]


def number(draw: st.DrawFn, width: int) -> int:
    return signed(draw(st.sampled_from(CORNERS) | st.integers(0, (1 << width) - 1)), width)


@st.composite
def known_numbers(draw: st.DrawFn, width: int) -> Known:
    """Constant, of the block, of the thread, or their sum, in the signed range of ``width`` bits."""
    form = draw(st.sampled_from(["constant", "constant", "block", "thread", "sum", "dense"]))
    if form == "constant":
        return constant(number(draw, width))
    rows = 1 if form == "thread" else BLOCKS
    columns = 1 if form == "block" else THREADS
    if form == "sum":
        half = 1 << max(1, width - 3)
        block = [
            draw(st.integers(0, 5)) * draw(st.sampled_from([1, 3, 8, 16, 1 << width // 2]))
            for _ in range(BLOCKS)
        ]
        thread = [draw(st.integers(-2, 40)) for _ in range(THREADS)]
        parts = np.array(block, dtype=np.int64)[:, None] % half, np.array(thread, dtype=np.int64)[None, :]
        return known(*parts)
    values = np.array([[number(draw, width) for _ in range(columns)] for _ in range(rows)], dtype=np.int64)
    return known(ZERO, values) if rows == 1 else known(values)


@st.composite
def operands(draw: st.DrawFn, sources: tuple[int, ...], divides: bool) -> list[Value]:
    found: list[Value] = []
    for index, width in enumerate(sources):
        if width == 0:
            flags = np.array([[draw(st.booleans()) for _ in range(THREADS)]])
            found.append(Predicate(flags, ~flags))
        elif width == 8:
            found.append(constant(draw(st.integers(0, 255))))
        else:
            value = draw(known_numbers(width))
            if divides and index == 1 and not np.all(value.block + value.thread):
                value = constant(draw(st.sampled_from([1, 2, 3, 7, 16, -1, -5])))
            found.append(value)
    return found


def laid_out(value: Value) -> np.ndarray:
    if isinstance(value, Predicate):
        return np.broadcast_to(value.true, (BLOCKS, THREADS))
    assert isinstance(value, Known)
    return np.broadcast_to(value.block + value.thread, (BLOCKS, THREADS))


def expected(opcode: str, sources: list[Value]) -> np.ndarray:
    """The reference's results as signed numbers."""
    row = INSTRUCTIONS[opcode]
    arrays = [laid_out(value) for value in sources]
    found = np.zeros((BLOCKS, THREADS), dtype=np.int64)
    for place in np.ndindex(BLOCKS, THREADS):
        values = [
            int(array[place]) & ((1 << width) - 1) if width else bool(array[place])
            for array, width in zip(arrays, row.sources, strict=True)
        ]
        result = int(row.compute(*values))
        found[place] = signed(result, row.width) if row.width else result
    return found


def is_exact(opcode: str, sources: list[Value], result: Value) -> bool:
    if isinstance(result, Predicate):
        return not (result.true & result.false).any() and bool(
            (laid_out(result) == expected(opcode, sources)).all()
        )
    return isinstance(result, Known) and bool((laid_out(result) == expected(opcode, sources)).all())


def admits(value: Value, results: np.ndarray) -> bool:
    """Whether a value allows all of these results, one per thread."""
    if isinstance(value, Predicate):
        true, false = (np.broadcast_to(mask, results.shape) for mask in (value.true, value.false))
        return bool(np.where(results != 0, true, false).all())
    if isinstance(value, Known):
        return bool((laid_out(value) == results).all())
    return (value.low is None or value.low <= results.min()) and (
        value.high is None or value.high >= results.max()
    )


def bounded_only(opcode: str, sources: list[Value]) -> bool:
    """Large numbers of 64 bits are only bounded by some instructions, such as unsigned ones beyond the sign bit."""
    row = INSTRUCTIONS[opcode]
    if 64 not in (*row.sources, row.width):
        return False
    return any(
        isinstance(value, Known) and (value.low < 0 or value.high >= 1 << 31 or value.low < -(1 << 31))
        for value in sources
    )


@pytest.mark.parametrize("opcode", INSTRUCTIONS)
@settings(max_examples=5, deadline=None, phases=PHASES)
@given(data=st.data())
def test_known_numbers_give_exact_results(opcode: str, data: st.DataObject) -> None:
    sources = data.draw(operands(INSTRUCTIONS[opcode].sources, opcode[:3] in ("div", "rem")))
    result = semantics.evaluate(SHAPE, tuple(opcode.split(".")), tuple(sources))
    assert admits(result, expected(opcode, sources))
    if not bounded_only(opcode, sources):
        assert is_exact(opcode, sources, result)


@pytest.mark.parametrize("opcode", INSTRUCTIONS)
@settings(max_examples=5, deadline=None, phases=PHASES)
@given(data=st.data())
def test_bounded_numbers_give_bounds_that_hold(opcode: str, data: st.DataObject) -> None:
    """Some operands are known only as an interval: whatever they really are, the result must allow for it."""
    sources = data.draw(operands(INSTRUCTIONS[opcode].sources, opcode[:3] in ("div", "rem")))
    blurred: list[Value] = []
    for value, width in zip(sources, INSTRUCTIONS[opcode].sources, strict=True):
        if width > 8 and isinstance(value, Known) and data.draw(st.booleans()):
            slack = data.draw(st.integers(0, 9))
            limit = 1 << (width - 1)
            blurred.append(
                Unknown(NUMBER, max(-limit, value.low - slack), min(limit - 1, value.high + slack))
            )
        else:
            blurred.append(value)
    result = semantics.evaluate(SHAPE, tuple(opcode.split(".")), tuple(blurred))
    assert admits(result, expected(opcode, sources))


@pytest.mark.parametrize("opcode", sorted(semantics.TRANSFERS))
def test_every_entry_of_the_registry_is_needed(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it some instruction on constants would no longer be exact."""
    others = {"cvta": "cvta.to.global.u64", "addc": "addc.u32", "subc": "subc.u32", "madc": "madc.lo.u32"}
    names = [name for name in INSTRUCTIONS if name.split(".")[0] == opcode] or [others[opcode]]
    parts = tuple(names[0].split("."))
    row = INSTRUCTIONS.get(names[0])
    sources = tuple(
        constant(7) if width else Predicate(np.ones((1, 1), dtype=np.bool_), np.zeros((1, 1), dtype=np.bool_))
        for width in (row.sources if row else (32,) * {"cvta": 1, "madc": 4}.get(opcode, 3))
    )
    assert not isinstance(semantics.evaluate(SHAPE, parts, sources), Unknown)
    monkeypatch.setattr(semantics, "TRANSFERS", {k: v for k, v in semantics.TRANSFERS.items() if k != opcode})
    assert isinstance(semantics.evaluate(SHAPE, parts, sources), Unknown)


EXCHANGED = {
    "shfl": "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
    "vote": "setp.lt.u32 %p1, %r1, 8; vote.sync.ballot.b32 %r2, %p1, -1;",
    "redux": "redux.sync.add.s32 %r2, %r1, -1;",
    "match": "match.any.sync.b32 %r2, %r1, -1;",
    "activemask": "activemask.b32 %r2;",
    "elect": "elect.sync %r2|%p1, -1;",
}
ANY_LANE = {"match", "activemask", "elect"}  # decided while the launch runs: bounded, never exact


def exchanged(code: str) -> Value:
    """What %r2 holds after ``code``, in a warp of which each thread has its own number in %r1."""
    parsed = kernel(
        f"{code} mul.wide.s32 %rd7, %r2, 4; add.s64 %rd6, %rd2, %rd7; st.global.u32 [%rd6], %r1; ret;"
    )
    launch = launch_of(parsed, "k", (1, 1, 1), (32, 1, 1), (Pointer(0), Pointer(1), 0))
    threads = Threads(kernel_of(parsed, "k"), launch, np.zeros(1, dtype=np.int64))
    for step in threads.kernel.flow.steps:
        if not (step.targets or step.ends):
            threads.execute(step, ALWAYS, ALWAYS, True)
    return threads.registers["%r2"]


@pytest.mark.parametrize("opcode", sorted(warp.EXCHANGES))
def test_every_exchange_is_needed(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing would be known of what the threads of a warp get from each other."""
    value = exchanged(EXCHANGED[opcode])
    assert isinstance(value, Unknown if opcode in ANY_LANE else Known)
    assert not isinstance(value, Predicate) and value.low is not None and value.high is not None
    monkeypatch.setattr(execution, "EXCHANGES", warp.EXCHANGES - {opcode})
    value = exchanged(EXCHANGED[opcode])
    assert isinstance(value, Unknown) and value.low is value.high is None


@pytest.mark.parametrize("operation", sorted(warp._REDUCTIONS))
def test_every_reduction_is_needed(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"redux.sync.{operation}.{'b32' if operation in ('and', 'or', 'xor') else 'u32'} %r2, %r1, -1;"
    lanes = range(32)
    results = {"add": sum(lanes), "min": 0, "max": 31, "and": 0, "or": 31, "xor": 0}
    value = exchanged(code)
    assert isinstance(value, Known) and value.low == value.high == results[operation]
    kept = {name: function for name, function in warp._REDUCTIONS.items() if name != operation}
    monkeypatch.setattr(warp, "_REDUCTIONS", kept)
    assert isinstance(exchanged(code), Unknown)


def test_numbers_wrap_at_their_width() -> None:
    assert wrap(np.array([(1 << 31) + 5, -(1 << 31) - 1]), 32).tolist() == [-(1 << 31) + 5, (1 << 31) - 1]
