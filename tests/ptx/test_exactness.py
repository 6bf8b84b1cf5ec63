"""Analysed accesses against an oracle that runs every thread: never a byte missed, never a false sure write, and for
kernels without data-dependent addresses not a byte too many."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tessera_core.ptx.analysis import LaunchShape, analyse_launch
from tessera_core.ptx.syntax import Module
from tests.ptx.emulator import observe
from tests.ptx.launches import Pointer, claimed, launch_of, module

BLOCK = (128, 1, 1)
# No shrinking: an example runs every thread and takes a good part of a second.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TRITON = ["sm_80", "sm_90", "sm_100"]
NVCC = ["nvcc.sm_90", "nvcc.sm_100"]

Case = tuple[LaunchShape, dict[int, bytes]]


def zeros(*sizes: int) -> dict[int, bytes]:
    return {buffer: bytes(size) for buffer, size in enumerate(sizes)}


def check(parsed: Module, case: Case, exact: bool) -> None:
    launch, memory = case
    sizes = {buffer: len(content) for buffer, content in memory.items()}
    analysis = analyse_launch(parsed, launch, sizes)
    seen = observe(parsed, launch, memory)
    for mode, observed in (("read", seen.read), ("write", seen.written)):
        may, must = claimed(analysis, sizes, mode, must=False), claimed(analysis, sizes, mode, must=True)
        for buffer in sizes:
            assert not (observed[buffer] & ~may[buffer]).any(), f"{mode} of buffer {buffer} missed"
            assert not (must[buffer] & ~observed[buffer]).any(), f"{mode} of buffer {buffer} falsely sure"
            if exact:
                assert (observed[buffer] == must[buffer]).all(), f"{mode} of buffer {buffer} not exact"
                assert (observed[buffer] == may[buffer]).all(), f"{mode} of buffer {buffer} too wide"
    if exact:
        assert all(access.precision == "exact" and access.must for access in analysis.accesses)
        assert not analysis.fallbacks and not analysis.unknown_opcodes


def rms_norm(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, hidden = draw(1, 3), 8 * draw(1, 128)
    stride = hidden + 8 * draw(0, 2)
    arguments = (Pointer(0), Pointer(1), Pointer(2), stride, hidden, 1e-5)
    size = ((rows - 1) * stride + hidden) * 2
    return launch_of(parsed, "rms_norm", (rows, 1, 1), BLOCK, arguments), zeros(size, hidden * 2, size)


def rotary(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    tokens, heads = draw(1, 2), draw(1, 9)
    in_place = draw(0, 1)
    arguments = (Pointer(0), Pointer(1), Pointer(2), Pointer(0 if in_place else 3), heads)
    size = tokens * heads * 128
    grid = (tokens, -(-heads // 4), 1)
    return launch_of(parsed, "rotary", grid, BLOCK, arguments), zeros(size, tokens * 128, tokens * 128, size)


def silu_multiply(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    count = draw(1, 3000)
    arguments = (Pointer(0, 256), Pointer(1), Pointer(2), count)
    memory = zeros(count * 2 + 256, count * 2, count * 2)
    return launch_of(parsed, "silu_multiply", (-(-count // 1024), 1, 1), BLOCK, arguments), memory


def softmax(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, columns = draw(1, 3), draw(1, 512)
    stride = columns + draw(0, 9)
    size = ((rows - 1) * stride + columns) * 4
    arguments = (Pointer(0), Pointer(1), stride, columns)
    return launch_of(parsed, "softmax", (rows, 1, 1), BLOCK, arguments), zeros(size, size)


def strided_copy(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, columns = draw(1, 20), draw(1, 100)
    strides = columns + draw(0, 30), columns + draw(0, 30)
    sizes = [((rows - 1) * stride + columns) * 4 for stride in strides]
    grid = (-(-rows // 8), -(-columns // 64), 1)
    arguments = (Pointer(0), Pointer(1), rows, columns, *strides)
    return launch_of(parsed, "strided_copy", grid, BLOCK, arguments), zeros(*sizes)


def matmul(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    m, n, k = draw(1, 40), draw(1, 40), draw(1, 70)
    strides = [16 * (-(-extent // 16) + draw(0, 1)) for extent in (k, n, n)]
    rows = (m, k, m)
    columns = (k, n, n)
    sizes = [((r - 1) * s + c) * 2 for r, s, c in zip(rows, strides, columns, strict=True)]
    grid = (-(-m // 32) * -(-n // 32), 1, 1)
    arguments = (Pointer(0), Pointer(1), Pointer(2), m, n, k, *strides)
    return launch_of(parsed, "matmul", grid, BLOCK, arguments), zeros(*sizes)


def embedding(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, hidden, words = draw(1, 3), 16 * draw(1, 32), 7
    tokens = np.array([draw(0, words - 1) for _ in range(rows)], dtype=np.int64).tobytes()
    arguments = (Pointer(0), Pointer(1), Pointer(2), hidden)
    memory = {0: bytes(words * hidden * 2), 1: tokens, 2: bytes(rows * hidden * 2)}
    return launch_of(parsed, "embedding", (rows, 1, 1), BLOCK, arguments), memory


def row_sum(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, stride = draw(1, 3), draw(1, 400)
    lengths = np.array([draw(0, stride) for _ in range(rows)], dtype=np.int32).tobytes()
    memory = {0: bytes(rows * stride * 4), 1: lengths, 2: bytes(rows * 4)}
    arguments = (Pointer(0), Pointer(1), Pointer(2), stride)
    return launch_of(parsed, "row_sum", (rows, 1, 1), BLOCK, arguments), memory


def saxpy(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    count = draw(1, 700)
    arguments = (count, 2.0, Pointer(0), Pointer(1))
    return launch_of(parsed, "saxpy", (3, 1, 1), (256, 1, 1), arguments), zeros(count * 4, count * 4)


def grid_stride(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    count, blocks = draw(1, 900), draw(1, 3)
    arguments = (count, Pointer(0), Pointer(1))
    return launch_of(parsed, "grid_stride", (blocks, 1, 1), (64, 1, 1), arguments), zeros(
        count * 16, count * 16
    )


def column_sums(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, columns = draw(1, 300), draw(1, 4)
    stride = columns + draw(0, 3)
    layout = np.array([rows, columns, stride], dtype=np.int64).tobytes() + bytes(8)
    launch = launch_of(parsed, "column_sums", (columns, 1, 1), BLOCK, (layout, Pointer(1)))
    pointer = launch_of(parsed, "column_sums", (columns, 1, 1), BLOCK, (layout, Pointer(1))).relocations[0]
    inner = type(pointer)(24, 0, 0)
    launch = LaunchShape(
        entry=launch.entry,
        grid=launch.grid,
        block=launch.block,
        shared_bytes=0,
        parameters=launch.parameters,
        relocations=(inner, pointer),
    )
    return launch, zeros(((rows - 1) * stride + columns) * 4, columns * 4)


def gather(parsed: Module, draw: Callable[[int, int], int]) -> Case:
    rows, width, words = draw(1, 3), draw(1, 300), 5
    index = np.array([draw(0, words - 1) for _ in range(rows)], dtype=np.int32).tobytes()
    arguments = (Pointer(0), Pointer(1), Pointer(2), width)
    memory = {0: index, 1: bytes(words * width * 4), 2: bytes(rows * width * 4)}
    return launch_of(parsed, "gather", (rows, 1, 1), (64, 1, 1), arguments), memory


EXACT = [rms_norm, rotary, silu_multiply, softmax, strided_copy, matmul]
EXACT_NVCC = [saxpy, grid_stride, column_sums]
Builder = Callable[[Module, Callable[[int, int], int]], Case]


def stems(builders: list[Builder], builds: list[str], file: str = "") -> list[object]:
    return [
        pytest.param(builder, f"{file or builder.__name__}.{build}", id=f"{builder.__name__}-{build}")
        for builder in builders
        for build in builds
    ]


def drawn(builder: Builder, stem: str, data: st.DataObject) -> tuple[Module, Case]:
    parsed = module(stem)
    return parsed, builder(parsed, lambda low, high: data.draw(st.integers(low, high)))


@pytest.mark.parametrize(("builder", "stem"), stems(EXACT, TRITON) + stems(EXACT_NVCC, NVCC, "strided"))
@settings(max_examples=4, deadline=None, phases=PHASES)
@given(data=st.data())
def test_every_byte_is_claimed_and_no_other(builder: Builder, stem: str, data: st.DataObject) -> None:
    check(*drawn(builder, stem, data), exact=True)


@pytest.mark.parametrize(
    ("builder", "stem"), stems([embedding, row_sum], TRITON) + stems([gather], NVCC, "strided")
)
@settings(max_examples=4, deadline=None, phases=PHASES)
@given(data=st.data())
def test_data_dependent_addresses_stay_within_their_allocation(
    builder: Builder, stem: str, data: st.DataObject
) -> None:
    parsed, case = drawn(builder, stem, data)
    check(parsed, case, exact=False)
    launch, memory = case
    analysis = analyse_launch(parsed, launch, {buffer: len(content) for buffer, content in memory.items()})
    assert not analysis.fallbacks
    written = {access.buffer for access in analysis.accesses if access.mode == "write"}
    assert written == {2}, "an index read from memory must not widen the writes"
    assert all(
        access.must and access.precision == "exact" for access in analysis.accesses if access.mode == "write"
    )


def test_large_launches_agree_with_arithmetic() -> None:
    """Prefill sizes, far beyond what the emulator can run: against closed forms."""
    parsed = module("silu_multiply.sm_90")
    count = 8192 * 14336 - 77
    launch = launch_of(
        parsed, "silu_multiply", (-(-count // 1024), 1, 1), BLOCK, (Pointer(0), Pointer(1), Pointer(2), count)
    )
    sizes: Mapping[int, int] = dict.fromkeys(range(3), count * 2)
    analysis = analyse_launch(parsed, launch, sizes)
    assert [
        (a.buffer, a.mode, a.must, a.boxes and (a.boxes[0].low, a.boxes[0].high)) for a in analysis.accesses
    ] == [
        (0, "read", True, (0, count * 2)),
        (1, "read", True, (0, count * 2)),
        (2, "write", True, (0, count * 2)),
    ]
