"""Sets of bytes as strided boxes: no byte lost, none invented."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.program.boxes import Box
from tessera_core.ptx.compress import boxes_of_intervals, cover, merge, union, within
from tests.ptx.launches import marks

SIZE = 400
intervals = st.lists(st.tuples(st.integers(0, SIZE - 20), st.integers(1, 19)), min_size=1, max_size=40)


def flags(pairs: list[tuple[int, int]]) -> np.ndarray:
    found = np.zeros(SIZE, dtype=np.bool_)
    for start, length in pairs:
        found[start : start + length] = True
    return found


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    return starts, starts + np.array([length for _, length in pairs], dtype=np.int64)


@given(intervals)
def test_boxes_hold_exactly_the_bytes_of_the_intervals(pairs: list[tuple[int, int]]) -> None:
    boxes = boxes_of_intervals(*merge(*arrays(pairs)))
    assert (marks(boxes, SIZE) == flags(pairs)).all()
    assert (marks(union(boxes[::-1]), SIZE) == flags(pairs)).all()


@given(intervals, st.integers(2, 5))
def test_a_cover_contains_and_a_selection_is_contained(pairs: list[tuple[int, int]], limit: int) -> None:
    boxes = boxes_of_intervals(*merge(*arrays(pairs)))
    wide, exact = cover(boxes, limit)
    assert len(wide) <= limit
    assert not (flags(pairs) & ~marks(wide, SIZE)).any()
    assert not exact or (marks(wide, SIZE) == flags(pairs)).all()
    narrow = within(boxes, limit)
    assert len(narrow) <= limit
    assert not (marks(narrow, SIZE) & ~flags(pairs)).any()


def test_a_tiled_tensor_is_one_box() -> None:
    starts = np.sort(
        (np.arange(3)[:, None, None] * 100 + np.arange(4)[None, :, None] * 20 + np.arange(2) * 6).ravel()
    )
    assert boxes_of_intervals(starts, starts + 2) == [Box(0, ((3, 100), (4, 20), (2, 6)), 2)]
