"""What single blocks touch, against formulas of the kernels' own authors: linear orders, swizzles and edges."""

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.ptx.analysis import BlockFootprint, LaunchAnalysis, LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module

BLOCK = 32
BLOCK_BYTES = 4 * BLOCK


def analysed(
    body: str, grid: tuple[int, int, int], count: int = 1 << 20, sizes: Sequence[int] = (1 << 20, 1 << 20)
) -> LaunchAnalysis:
    """A kernel (a, b, count) whose ``body`` finds a in %rd1, b in %rd2, count in %r9, ctaid in %r1 to %r3,
    tid.x in %r4."""
    text = f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry work(.param .u64 a, .param .u64 b, .param .u32 count)
{{
  .reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.param.u32 %r9, [count];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ctaid.y;
  mov.u32 %r3, %ctaid.z;
  mov.u32 %r4, %tid.x;
  {body}
  ret;
}}
"""
    launch = LaunchShape(
        entry="work",
        grid=grid,
        block=(BLOCK, 1, 1),
        shared_bytes=0,
        parameters=bytes(16) + struct.pack("<i", count),
        relocations=(Relocation(0, 0, 0), Relocation(8, 1, 0)),
    )
    return analyse_launch(parse_module(text, "work.ptx"), launch, dict(enumerate(sizes)))


def element(index: str) -> str:
    """%rd5 = a and %rd6 = b, at element ``index`` (a 32-bit register)."""
    return f"mul.wide.s32 %rd4, {index}, 4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;"


def of_block(footprints: Sequence[BlockFootprint], block: tuple[int, int, int]) -> set[int]:
    """The bytes that forms give for one block."""
    found: set[int] = set()
    for form in footprints:
        assert form.boxes is not None
        if all(low <= at <= high for low, at, high in zip(form.first, block, form.last, strict=True)):
            moved = sum(step * (at - low) for step, at, low in zip(form.step, block, form.first, strict=True))
            for box in form.boxes:
                for start, end in box.shifted(moved).intervals():
                    found.update(range(start, end))
    return found


def forms(analysis: LaunchAnalysis, buffer: int, mode: str) -> list[BlockFootprint]:
    return [f for f in analysis.block_footprints if f.buffer == buffer and f.mode == mode]


COPY = "ld.global.u32 %r10, [%rd5]; st.global.u32 [%rd6], %r10;"
INDEX = f"mad.lo.s32 %r5, %r1, {BLOCK}, %r4;"


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(0, BLOCK - 1))
def test_a_copy_moves_by_its_block_and_ends_in_a_shorter_one(blocks: int, missing: int) -> None:
    count = blocks * BLOCK - missing
    body = f"{INDEX} setp.ge.s32 %p1, %r5, %r9; {element('%r5')} @%p1 bra END; {COPY} END:"
    found = analysed(body, (blocks, 1, 1), count)
    assert found.split.independent and found.split.blocks == blocks
    for buffer, mode, must in ((0, "read", False), (1, "write", True)):
        mine = forms(found, buffer, mode)
        assert all(form.must == must for form in mine) and len(mine) <= 2
        for block in {0, blocks // 2, blocks - 1}:
            low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, 4 * count)
            assert of_block(mine, (block, 0, 0)) == set(range(low, high))


def test_three_axes_and_a_reversed_one() -> None:
    grid = (3, 4, 5)
    body = (
        "sub.s32 %r6, 3, %r2; mad.lo.s32 %r5, %r3, 4, %r6; mad.lo.s32 %r5, %r5, 3, %r1;"
        f"mad.lo.s32 %r5, %r5, {BLOCK}, %r4; {element('%r5')} {COPY}"
    )
    found = analysed(body, grid)
    assert found.split.independent
    (form,) = forms(found, 1, "write")
    assert form.step == (BLOCK_BYTES, -3 * BLOCK_BYTES, 12 * BLOCK_BYTES)
    for x, y, z in np.ndindex(*grid):
        low = ((z * 4 + 3 - y) * 3 + x) * BLOCK_BYTES
        assert of_block([form], (x, y, z)) == set(range(low, low + BLOCK_BYTES))


def test_a_swizzled_order_has_no_form_and_its_blocks_are_independent_all_the_same() -> None:
    body = f"xor.b32 %r6, %r1, 5; mad.lo.s32 %r5, %r6, {BLOCK}, %r4; {element('%r5')} {COPY}"
    found = analysed(body, (256, 1, 1))
    (form,) = forms(found, 1, "write")
    assert form.boxes is None and (form.first, form.last) == ((0, 0, 0), (255, 0, 0))
    assert found.split.independent


def test_a_tile_order_of_few_runs_is_given_run_by_run() -> None:
    """Four blocks along a row, then the next row, in a buffer whose rows are longer."""
    body = (
        "rem.s32 %r6, %r1, 4; div.s32 %r7, %r1, 4; mul.lo.s32 %r7, %r7, 1000;"
        f"mad.lo.s32 %r5, %r6, {BLOCK}, %r4; add.s32 %r5, %r5, %r7; {element('%r5')} {COPY}"
    )
    found = analysed(body, (12, 1, 1))
    written = forms(found, 1, "write")
    assert len(written) == 3
    for block in range(12):
        low = 4000 * (block // 4) + BLOCK_BYTES * (block % 4)
        assert of_block(written, (block, 0, 0)) == set(range(low, low + BLOCK_BYTES))


def test_blocks_that_write_the_same_bytes_are_not_independent() -> None:
    body = f"mad.lo.s32 %r5, %r1, {BLOCK - 1}, %r4; {element('%r5')} {COPY}"
    split = analysed(body, (8, 1, 1)).split
    assert not split.disjoint_writes and not split.independent
    assert "several blocks may write the same bytes" in split.reason


def test_a_block_that_reads_its_neighbours_result_is_not_independent() -> None:
    shifted = f"{INDEX} {element('%r5')} ld.global.u32 %r10, [%rd6+4]; st.global.u32 [%rd6], %r10;"
    split = analysed(shifted, (8, 1, 1)).split
    assert split.disjoint_writes and not split.reads_apart and not split.independent
    assert "may read what another writes" in split.reason
    in_place = f"{INDEX} {element('%r5')} ld.global.u32 %r10, [%rd6]; st.global.u32 [%rd6], %r10;"
    assert analysed(in_place, (8, 1, 1)).split.independent
    alone = analysed(shifted, (1, 1, 1)).split
    assert alone.independent


def test_a_block_that_reads_where_all_write_is_not_apart() -> None:
    body = f"{element('%r4')} ld.global.u32 %r10, [%rd6]; st.global.u32 [%rd6], %r10;"
    split = analysed(body, (2, 1, 1)).split
    assert (split.disjoint_writes, split.reads_apart) == (False, False)


def test_atomics_and_data_dependent_writes_are_named() -> None:
    atomic = f"{INDEX} {element('%r5')} red.global.add.u32 [%rd6], 1;"
    split = analysed(atomic, (8, 1, 1)).split
    assert split.atomics and split.disjoint_writes and split.reason == "atomics on global memory"
    scatter = (
        f"{INDEX} {element('%r5')} ld.global.u32 %r11, [%rd5]; {element('%r11')} st.global.u32 [%rd6], 1;"
    )
    found = analysed(scatter, (8, 1, 1))
    assert "not bounded by block" in found.split.reason and "line" in found.split.reason
    assert [form.boxes for form in forms(found, 1, "write")] == [None]


def test_an_unknown_instruction_leaves_nothing_proven() -> None:
    found = analysed("mystery.b32 %r10, [%rd1];", (8, 1, 1))
    assert found.block_footprints == () and "mystery" in found.split.reason
    assert not (found.split.disjoint_writes or found.split.reads_apart)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 6))
def test_independence_agrees_with_counting_bytes(reads: list[int], stride: int, shift: int) -> None:
    """Blocks write 4 bytes at ``stride`` apart (in words) and read some words on; counted byte by byte."""
    blocks = 6
    body = f"mul.lo.s32 %r5, %r1, {stride}; add.s32 %r5, %r5, {shift}; {element('%r5')}"
    loads = "".join(f"ld.global.u32 %r{10 + i}, [%rd6+{4 * word}];" for i, word in enumerate(reads))
    split = analysed(f"{body} {loads} st.global.u32 [%rd6+4], 1;", (blocks, 1, 1)).split
    written = [{stride * b + shift + 1} for b in range(blocks)]
    read = [{stride * b + shift + word for word in reads} for b in range(blocks)]
    pairs = [(i, k) for i in range(blocks) for k in range(blocks) if i != k]
    assert split.disjoint_writes == (not any(written[i] & written[k] for i, k in pairs))
    assert split.reads_apart == (not any(written[i] & read[k] for i, k in pairs))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "mov.u32 %r5, s; mapa.shared::cluster.u32 %r6, %r5, 0; st.shared::cluster.u32 [%r6], %r1;",
            "the blocks of a cluster share memory",
        ),
        ("barrier.cluster.arrive; barrier.cluster.wait;", "the blocks of a cluster share memory"),
        ("st.global.u32 [v], %r1;", "blocks may meet in the module variable v"),
    ],
)
def test_blocks_that_meet_elsewhere_than_in_buffers_are_not_independent(code: str, reason: str) -> None:
    own = f"mad.lo.s32 %r7, %r1, {BLOCK}, %r4; {element('%r7')} st.global.u32 [%rd5], %r1;"
    before = ".shared .align 8 .b8 s[128]; .global .align 8 .b8 v[128];"
    assert analysed(f"{before} {own}", (4, 1, 1)).split.independent
    split = analysed(f"{before} {code} {own}", (4, 1, 1)).split
    assert not split.independent and split.reason.startswith(reason)
