"""Boxes against sets of bytes."""

import itertools
from collections.abc import Sequence
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from tessera_core.program import boxes as boxes_module
from tessera_core.program.boxes import Box, ByteSet, covers, may_overlap, tensor_box, union_bytes

DIMS = st.lists(st.tuples(st.integers(1, 4), st.integers(-30, 30)), max_size=3)


def brute(start: int, dims: Sequence[tuple[int, int]], run: int) -> set[int]:
    points = itertools.product(*(range(count) for count, _ in dims))
    corners = (
        start + sum(i * stride for i, (_, stride) in zip(point, dims, strict=True)) for point in points
    )
    return {corner + byte for corner in corners for byte in range(run)}


def bytes_of(*boxes: Box) -> set[int]:
    return {byte for box in boxes for byte in brute(box.start, box.dims, box.run)}


def nested(box: Box) -> bool:
    """Whether no two rows meet or interleave."""
    extent = box.run
    for count, stride in reversed(box.dims):
        if stride < extent:
            return False
        extent += (count - 1) * stride
    return True


boxes = st.builds(Box.of, st.integers(0, 120), DIMS, st.integers(1, 12))
few = st.lists(boxes, max_size=4)


@given(st.integers(0, 120), DIMS, st.integers(1, 12))
def test_normalising_changes_no_byte(start: int, dims: list[tuple[int, int]], run: int) -> None:
    box = Box.of(start, dims, run)
    assert bytes_of(box) == brute(start, dims, run)
    assert all(count >= 2 and stride > box.run for count, stride in box.dims)
    assert [stride for _, stride in box.dims] == sorted((s for _, s in box.dims), reverse=True)
    assert Box.of(box.start, box.dims, box.run) == box


@given(boxes)
def test_bounds_rows_and_size(box: Box) -> None:
    found = bytes_of(box)
    assert (box.low, box.high) == (min(found), max(found) + 1)
    assert {b for low, high in box.intervals() for b in range(low, high)} == found
    assert len(list(box.intervals())) == box.rows
    assert box.bytes >= len(found)
    if nested(box):
        assert box.bytes == len(found)
    assert bytes_of(box.shifted(7)) == {byte + 7 for byte in found}


@given(boxes, boxes)
def test_overlap_is_exact_while_rows_are_few_and_never_missed_beyond(first: Box, second: Box) -> None:
    truth = not bytes_of(first).isdisjoint(bytes_of(second))
    assert may_overlap(first, second) == truth == may_overlap(second, first)
    with mock.patch.object(boxes_module, "EXACT_ROWS_LIMIT", 1):
        assert may_overlap(first, second) or not truth


@given(few, boxes)
def test_coverage_is_exact_while_rows_are_few_and_never_claimed_beyond(outer: list[Box], inner: Box) -> None:
    truth = bytes_of(inner) <= bytes_of(*outer)
    assert covers(outer, inner) == truth
    with mock.patch.object(boxes_module, "EXACT_ROWS_LIMIT", 1):
        assert truth or not covers(outer, inner)


@given(boxes, st.integers(0, 3), st.integers(0, 3))
def test_a_wider_box_covers_a_narrower_one_and_its_columns(box: Box, left: int, right: int) -> None:
    wide = Box(box.start, box.dims, box.run + left + right)
    assert covers([wide], Box(box.start + left, box.dims, box.run))


def test_halves_of_every_head_are_apart_however_many_heads_there_are() -> None:
    halves = [tensor_box(2, (1 << 20, 64), (128, 1), offset) for offset in (0, 64)]
    assert halves[0] and halves[1]
    assert halves[0].rows > boxes_module.EXACT_ROWS_LIMIT
    assert not may_overlap(halves[0], halves[1])
    assert may_overlap(halves[0], halves[1].shifted(-1))
    assert not covers([halves[0]], halves[1])


@given(few, few)
def test_byte_sets_are_sets(first: list[Box], second: list[Box]) -> None:
    one, two = ByteSet.of(first), ByteSet.of(second)
    assert one is not None and two is not None
    mine, theirs = bytes_of(*first), bytes_of(*second)
    for found, expected in ((one, mine), (one & two, mine & theirs), (one - two, mine - theirs)):
        assert found.bytes == len(expected)
        assert bool(found) == bool(expected)
        pairs = list(zip(found.lows.tolist(), found.highs.tolist(), strict=True))
        assert {b for low, high in pairs for b in range(low, high)} == expected
        folded = found.to_boxes(1000)
        assert folded is not None
        assert bytes_of(*folded) == expected
        assert len(folded) <= len(pairs)
    assert (one == two) == (mine == theirs)


@given(boxes)
def test_a_nested_box_folds_back_into_one(box: Box) -> None:
    whole = ByteSet.of([box])
    assert whole is not None
    folded = whole.to_boxes(1)
    if nested(box) and len(box.dims) <= 1:
        assert folded is not None
        assert bytes_of(*folded) == bytes_of(box)
    assert folded is None or len(folded) <= 1


@given(few)
def test_union_counts_shared_bytes_once(some: list[Box]) -> None:
    assert union_bytes(some, 10_000) == len(bytes_of(*some))
    assert union_bytes(some, 5) <= 5


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3),
    st.integers(0, 5),
    st.sampled_from([1, 2, 8]),
)
def test_a_tensor_touches_its_elements(dims: list[tuple[int, int]], offset: int, item: int) -> None:
    shape, stride = [count for count, _ in dims], [step for _, step in dims]
    box = tensor_box(item, shape, stride, offset)
    expected = brute(offset * item, [(count, step * item) for count, step in dims], item)
    assert (bytes_of(box) if box else set()) == expected
