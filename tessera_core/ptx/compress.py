"""Turns sets of bytes, given as starts and lengths, into few strided boxes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tessera_core.program.boxes import Box
from tessera_core.ptx.values import Int

# More boxes than this for one buffer and mode help nobody: they are coarsened.
BOXES_LIMIT = 64

# Unions are laid out row by row up to this many rows.
ROWS_LIMIT = 1 << 18

_LEVELS = 4  # tensors of a launch that is worth splitting have no more strided dimensions than this


def merge(starts: Int, ends: Int) -> tuple[Int, Int]:
    """Union of half-open intervals as disjoint ascending ones; touching intervals are joined."""
    if len(starts) == 0:
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last]


def boxes_of_intervals(starts: Int, ends: Int) -> list[Box]:
    """Exact strided boxes for disjoint ascending intervals: equal intervals at equal distances become one box,
    and equal boxes at equal distances one box more, up to four levels."""
    shapes: list[tuple[tuple[tuple[int, int], ...], int]] = []
    lengths = ends - starts
    unique, kinds = np.unique(lengths, return_inverse=True)
    shapes = [((), int(length)) for length in unique]
    positions = starts
    for _ in range(_LEVELS):
        before = len(positions)
        positions, kinds, shapes = _fold(positions, kinds, shapes)
        if len(positions) == before:
            break
    return [
        Box.of(int(start), shapes[int(kind)][0], shapes[int(kind)][1])
        for start, kind in zip(positions, kinds, strict=True)
    ]


def _fold(
    positions: Int, kinds: Int, shapes: list[tuple[tuple[tuple[int, int], ...], int]]
) -> tuple[Int, Int, list[tuple[tuple[tuple[int, int], ...], int]]]:
    """Join each maximal run of equal boxes at equal distances into one box with one more dimension."""
    count = len(positions)
    if count < 2:
        return positions, kinds, shapes
    same = kinds[1:] == kinds[:-1]
    distance = np.where(same, positions[1:] - positions[:-1], -1)
    # ends_at[i]: the last item of the run of equal distances that item i begins
    breaks = np.flatnonzero(distance[1:] != distance[:-1]) + 1
    found = dict[tuple[tuple[tuple[int, int], ...], int], int]()
    new_positions: list[int] = []
    new_kinds: list[int] = []
    at, next_break = 0, 0
    while at < count:
        while next_break < len(breaks) and breaks[next_break] <= at:
            next_break += 1
        dims, run = shapes[int(kinds[at])]
        end = at
        if at + 1 < count and distance[at] > 0:
            end = int(breaks[next_break]) if next_break < len(breaks) else count - 1
            dims = ((end - at + 1, int(distance[at])), *dims)
        shape = (dims, run)
        new_kinds.append(found.setdefault(shape, len(found)))
        new_positions.append(int(positions[at]))
        at = end + 1
    return np.array(new_positions, dtype=np.int64), np.array(new_kinds, dtype=np.int64), list(found)


def rows_of(boxes: Iterable[Box]) -> tuple[Int, Int]:
    """All runs of the boxes as (starts, ends), in no order."""
    starts = [box.row_starts() for box in boxes]
    ends = [rows + box.run for rows, box in zip(starts, boxes, strict=True)]
    return np.concatenate(starts), np.concatenate(ends)


def union(boxes: list[Box]) -> list[Box]:
    """The same bytes in as few boxes as the folding above finds; as given where there are too many rows."""
    if len(boxes) < 2:
        return boxes
    if sum(box.rows for box in boxes) > ROWS_LIMIT:
        return sorted(set(boxes), key=lambda box: (box.low, box.dims, box.run))
    return boxes_of_intervals(*merge(*rows_of(boxes)))


def cover(boxes: list[Box], limit: int = BOXES_LIMIT) -> tuple[list[Box], bool]:
    """At most ``limit`` boxes that contain all of ``boxes``, and whether they are still exactly those bytes."""
    if len(boxes) <= limit:
        return boxes, True
    ordered = sorted(boxes, key=lambda box: box.low)
    starts = np.array([box.low for box in ordered], dtype=np.int64)
    ends = np.maximum.accumulate(np.array([box.high for box in ordered], dtype=np.int64))
    gaps = starts[1:] - ends[:-1]
    widest = np.sort(np.argsort(gaps)[-(limit - 1) :])
    lows = np.concatenate((starts[:1], starts[widest + 1]))
    highs = np.concatenate((ends[widest], ends[-1:]))
    lows, highs = merge(lows, highs)
    return [Box.interval(int(low), int(high - low)) for low, high in zip(lows, highs, strict=True)], False


def within(boxes: list[Box], limit: int = BOXES_LIMIT) -> list[Box]:
    """At most ``limit`` of the boxes, the largest: what may still be claimed as surely written."""
    return sorted(sorted(boxes, key=lambda box: box.bytes, reverse=True)[:limit], key=lambda box: box.low)
