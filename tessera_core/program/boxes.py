"""Strided boxes of bytes: the one shape in which accesses, dependencies and transfers speak of memory.

A box is a set of bytes of one buffer, ``{start + sum(i_k * stride_k) + j}`` with ``0 <= i_k < count_k`` and
``0 <= j < run``. Tensor views, interleaved ones included, are exact boxes. Overlap and coverage are decided
exactly where that is cheap and otherwise on the safe side: ``may_overlap`` never misses a shared byte and
``covers`` never claims a byte that is not covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Above this many rows a box pair is compared by bounds instead of row by row: the answer stays safe, and
# no launch of the catalogue's models comes near it with boxes that are not nested.
EXACT_ROWS_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class Box:
    """A strided set of bytes.

    ``start``: first byte. ``dims``: (count, stride in bytes) pairs, outermost first, strides descending and
    positive, every count at least 2. ``run``: contiguous bytes at each point, at least 1.
    Build boxes with :meth:`of`, which normalises, so that equal simple sets compare equal.
    """

    start: int
    dims: tuple[tuple[int, int], ...]
    run: int

    @staticmethod
    def of(start: int, dims: Iterable[tuple[int, int]], run: int) -> Box:
        """Normalise: drop counts of one, flip negative strides, sort, and merge contiguous dimensions."""
        kept: list[tuple[int, int]] = []
        for count, stride in dims:
            if count <= 1 or stride == 0:
                continue
            if stride < 0:
                start += (count - 1) * stride
                stride = -stride
            kept.append((count, stride))
        kept.sort(key=lambda dim: dim[1], reverse=True)
        while kept and kept[-1][1] <= run:
            count, stride = kept.pop()
            run = (count - 1) * stride + run
        merged: list[tuple[int, int]] = []
        for count, stride in kept:
            if merged and merged[-1][1] == count * stride:
                merged[-1] = (merged[-1][0] * count, stride)
            else:
                merged.append((count, stride))
        return Box(start, tuple(merged), run)

    @staticmethod
    def interval(start: int, length: int) -> Box:
        """The contiguous bytes ``[start, start + length)``."""
        return Box(start, (), length)

    @property
    def low(self) -> int:
        """First byte."""
        return self.start

    @property
    def high(self) -> int:
        """One past the last byte."""
        return self.start + sum((count - 1) * stride for count, stride in self.dims) + self.run

    @property
    def bytes(self) -> int:
        """Bytes in the box; an upper bound where dimensions interleave onto the same bytes."""
        total = self.run
        for count, _ in self.dims:
            total *= count
        return min(total, self.high - self.low)

    @property
    def rows(self) -> int:
        """Number of contiguous runs."""
        total = 1
        for count, _ in self.dims:
            total *= count
        return total

    def row_starts(self) -> npt.NDArray[np.int64]:
        """Start byte of every run, ascending, shape ``(rows,)``."""
        starts = np.array([self.start], dtype=np.int64)
        for count, stride in self.dims:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64)[None, :] * stride).ravel()
        starts.sort()
        return starts

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Every run as ``(first byte, one past the last)``, ascending."""
        for start in self.row_starts():
            yield int(start), int(start) + self.run

    def shifted(self, distance: int) -> Box:
        """The same box ``distance`` bytes further on."""
        return Box(self.start + distance, self.dims, self.run)


def tensor_box(item_bytes: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> Box | None:
    """Bytes that a strided tensor touches in its storage (None if it has no element).

    ``stride`` and ``offset`` are in elements, as PyTorch states them; the box is in bytes.
    """
    if any(extent == 0 for extent in shape):
        return None
    dims = [(extent, step * item_bytes) for extent, step in zip(shape, stride, strict=True)]
    return Box.of(offset * item_bytes, dims, item_bytes)


def may_overlap(first: Box, second: Box) -> bool:
    """Whether two boxes share a byte; may say yes where they do not, never no where they do."""
    if first.high <= second.low or second.high <= first.low:
        return False
    if not first.dims and not second.dims:
        return True
    if first.rows > second.rows:
        first, second = second, first
    if second.rows > EXACT_ROWS_LIMIT:
        return True
    starts = second.row_starts()
    rows = first.row_starts()
    # A run of `first` at r meets a run of `second` at s iff r - second.run < s < r + first.run.
    left = np.searchsorted(starts, rows - second.run, side="right")
    right = np.searchsorted(starts, rows + first.run, side="left")
    return bool(np.any(right > left))


def covers(outer: Sequence[Box], inner: Box) -> bool:
    """Whether every byte of ``inner`` lies in the union of ``outer``; false where that is not shown."""
    if any(box == inner or (not box.dims and box.low <= inner.low and inner.high <= box.high) for box in outer):
        return True
    if inner.rows > EXACT_ROWS_LIMIT or sum(box.rows for box in outer) > EXACT_ROWS_LIMIT:
        return False
    merged = merge_intervals(pair for box in outer for pair in box.intervals())
    if not merged:
        return False
    lows = np.array([low for low, _ in merged], dtype=np.int64)
    highs = np.array([high for _, high in merged], dtype=np.int64)
    starts = inner.row_starts()
    index = np.searchsorted(lows, starts, side="right") - 1
    return bool(np.all(index >= 0) and np.all(highs[index] >= starts + inner.run))


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of half-open intervals as disjoint ascending ones; touching intervals are joined."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return merged


def union_bytes(boxes: Sequence[Box], limit: int) -> int:
    """Bytes in the union of boxes within a buffer of ``limit`` bytes; exact while the rows stay few."""
    if not boxes:
        return 0
    if len(boxes) == 1:
        return min(boxes[0].bytes, limit)
    if sum(box.rows for box in boxes) > EXACT_ROWS_LIMIT:
        return min(sum(box.bytes for box in boxes), limit)
    return sum(high - low for low, high in merge_intervals(p for box in boxes for p in box.intervals()))
