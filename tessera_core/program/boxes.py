"""Strided boxes of bytes: the one shape in which accesses, dependencies and transfers speak of memory.

A box is a set of bytes of one buffer, ``{start + sum(i_k * stride_k) + j}`` with ``0 <= i_k < count_k`` and
``0 <= j < run``. Tensor views, interleaved ones included, are exact boxes. Overlap and coverage are decided
exactly where that is cheap and otherwise on the safe side: ``may_overlap`` never misses a shared byte and
``covers`` never claims a byte that is not covered.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True, slots=True, eq=False)
class ByteSet:
    """An exact set of bytes: disjoint, ascending half-open intervals that do not touch, as int64 arrays.

    What boxes can't express (a box without some of its rows) stays exact here; :meth:`of` refuses sets with
    more than ``EXACT_ROWS_LIMIT`` rows, for which callers must stay on their safe side.
    """

    lows: npt.NDArray[np.int64]
    highs: npt.NDArray[np.int64]

    @staticmethod
    def of(boxes: Sequence[Box]) -> ByteSet | None:
        """The union of boxes; None where it has too many rows to be laid out."""
        if sum(box.rows for box in boxes) > EXACT_ROWS_LIMIT:
            return None
        if not boxes:
            return EMPTY
        if len(boxes) == 1 and not boxes[0].dims:
            return ByteSet(np.array([boxes[0].low]), np.array([boxes[0].high]))
        starts = [box.row_starts() for box in boxes]
        lows = np.concatenate(starts)
        highs = np.concatenate([rows + box.run for rows, box in zip(starts, boxes, strict=True)])
        order = np.argsort(lows, kind="stable")
        lows, reach = lows[order], np.maximum.accumulate(highs[order])
        first = np.concatenate([[True], lows[1:] > reach[:-1]])
        last = np.concatenate([first[1:], [True]])
        return ByteSet(lows[first], reach[last])

    def __bool__(self) -> bool:
        return bool(self.lows.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByteSet):
            return NotImplemented
        return np.array_equal(self.lows, other.lows) and np.array_equal(self.highs, other.highs)

    __hash__ = None  # type: ignore[assignment]  # arrays are compared, never looked up

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return int((self.highs - self.lows).sum())

    def __and__(self, other: ByteSet) -> ByteSet:
        # Interval i of self meets the intervals first[i]..last[i]-1 of other, and only these.
        first = np.searchsorted(other.highs, self.lows, side="right")
        last = np.searchsorted(other.lows, self.highs, side="left")
        counts = np.maximum(last - first, 0)
        mine = np.repeat(np.arange(len(self.lows)), counts)
        step = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = np.repeat(first, counts) + step
        return ByteSet(
            np.maximum(self.lows[mine], other.lows[theirs]), np.minimum(self.highs[mine], other.highs[theirs])
        )

    def __sub__(self, other: ByteSet) -> ByteSet:
        ends = np.iinfo(np.int64)
        gaps = ByteSet(
            np.concatenate([[ends.min], other.highs]).astype(np.int64),
            np.concatenate([other.lows, [ends.max]]).astype(np.int64),
        )
        return self & gaps

    def to_boxes(self, limit: int) -> tuple[Box, ...] | None:
        """The same bytes as at most ``limit`` boxes, equally spaced equal rows folded; None if they don't fit."""
        rows = zip(self.lows.tolist(), self.highs.tolist(), strict=True)
        boxes = [Box.interval(low, high - low) for low, high in rows]
        before = len(boxes) + 1
        while 1 < len(boxes) < before:
            before = len(boxes)
            boxes = _fold(boxes)
        return tuple(boxes) if len(boxes) <= limit else None


EMPTY = ByteSet(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def _fold(boxes: Sequence[Box]) -> list[Box]:
    """Runs of equally spaced boxes of one shape as one box each, greedily from the left."""
    folded: list[Box] = []
    index = 0
    while index < len(boxes):
        box = boxes[index]
        end = index + 1
        step = boxes[end].start - box.start if end < len(boxes) else 0
        while (
            end < len(boxes)
            and (boxes[end].dims, boxes[end].run) == (box.dims, box.run)
            and boxes[end].start - boxes[end - 1].start == step
        ):
            end += 1
        folded.append(Box.of(box.start, ((end - index, step), *box.dims), box.run))
        index = end
    return folded


def may_overlap(first: Box, second: Box) -> bool:
    """Whether two boxes share a byte; may say yes where they do not, never no where they do."""
    if first.high <= second.low or second.high <= first.low:
        return False
    if not first.dims and not second.dims:
        return True
    if _apart(first, second):
        return False
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


def _apart(first: Box, second: Box) -> bool:
    """Whether the boxes lie in different columns of a common grid, such as the halves of every head.

    Where g divides every stride, all runs of a box start at one residue modulo g, so that runs whose residues
    don't meet never do; this needs no rows.
    """
    grid = math.gcd(*(stride for box in (first, second) for _, stride in box.dims))
    if first.run + second.run > grid:
        return False
    ahead = (second.start - first.start) % grid
    return first.run <= ahead <= grid - second.run


def covers(outer: Sequence[Box], inner: Box) -> bool:
    """Whether every byte of ``inner`` lies in the union of ``outer``; false where that is not shown."""
    if any(_contains(box, inner) for box in outer):
        return True
    if inner.rows > EXACT_ROWS_LIMIT:
        return False
    union = ByteSet.of(outer)
    if not union:  # none, or too many rows to say
        return False
    starts = inner.row_starts()
    index = np.searchsorted(union.lows, starts, side="right") - 1
    return bool(np.all(index >= 0) and np.all(union.highs[index] >= starts + inner.run))


def _contains(outer: Box, inner: Box) -> bool:
    """Whether one box holds another by their shapes alone: an interval, or wider runs on the same grid."""
    if outer.low > inner.low or inner.high > outer.high:
        return False
    return not outer.dims or (outer.dims == inner.dims and inner.start + inner.run <= outer.start + outer.run)


def union_bytes(boxes: Sequence[Box], limit: int) -> int:
    """Bytes in the union of boxes within a buffer of ``limit`` bytes; exact while the rows stay few."""
    if len(boxes) == 1 and not boxes[0].dims:
        return min(boxes[0].run, limit)
    union = ByteSet.of(boxes)
    return min(sum(box.bytes for box in boxes) if union is None else union.bytes, limit)
