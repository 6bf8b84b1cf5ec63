"""Collects the accesses of one launch, site by site and group by group of blocks, and merges them into boxes per
buffer and mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tessera_core.program.boxes import Box
from tessera_core.ptx.compress import BOXES_LIMIT, ROWS_LIMIT, boxes_of_intervals, cover, merge, union, within
from tessera_core.ptx.values import ZERO, Bool, Int, Known

Mode = Literal["read", "write"]
Precision = Literal["exact", "bounded", "fallback"]

# Numbers of one block part that are kept as they come; beyond it they are merged, so that long loops over many
# threads need no more memory than what they touch has ranges.
KEPT_LIMIT = 1 << 20

# (buffer, mode, whether surely accessed)
_Key = tuple[int, Mode, bool]

# Places of threads, and how many bytes there: one number, or one for each
_Threads = tuple[Int, int | Int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxAccess:
    """What a launch does to one buffer.

    ``boxes``: bytes from the start of the buffer, None for the whole allocation. ``must``: every byte of the boxes
    is accessed by every run of the launch. ``precision``: ``exact`` (no byte more than some thread may access with
    these parameters), ``bounded`` (the base is known, the bytes are a superset), ``fallback`` (not even the base
    is known). ``reason`` and ``line`` say what kept the access from being exact, and where; else empty and the line
    of the first access.
    """

    buffer: int
    mode: Mode
    must: bool
    boxes: tuple[Box, ...] | None
    precision: Precision
    reason: str
    line: int


@dataclass(slots=True)
class Footprint:
    """The accesses seen so far. Grows during interpretation; :meth:`accesses` closes it."""

    # per key, per block part (as bytes): the block part and the thread parts with their lengths
    pieces: dict[_Key, dict[bytes, tuple[Int, list[_Threads]]]] = field(default_factory=dict)
    # numbers in the thread parts of each since they were last merged
    kept: dict[tuple[_Key, bytes], int] = field(default_factory=dict)
    boxes: dict[tuple[int, Mode], list[Box]] = field(default_factory=dict)
    bounded: dict[tuple[int, Mode], list[tuple[Box | None, str, int]]] = field(default_factory=dict)
    first_line: dict[tuple[int, Mode], int] = field(default_factory=dict)
    everything: dict[str, int] = field(default_factory=dict)
    # module variables in device memory, with the first line that reads or writes each
    variables: dict[tuple[str, Mode], int] = field(default_factory=dict)

    def add(self, mode: Mode, address: Known, length: int, can: Bool, must: Bool, line: int) -> None:
        """Record ``length`` bytes at ``address`` for the threads that can be, and those that must be, here."""
        self.first_line.setdefault((address.base, mode), line)
        self._piece((address.base, mode, False), address, length, can)
        if must.any():
            self._piece((address.base, mode, True), address, length, must)

    def add_boxes(self, mode: Mode, base: int, boxes: list[Box]) -> None:
        """Record bytes that some thread may access, none of them surely."""
        self.boxes.setdefault((base, mode), []).extend(boxes)

    def add_bounded(self, mode: Mode, base: int, box: Box | None, reason: str, line: int) -> None:
        """Record an access of which only the base, and perhaps an interval, is known."""
        self.first_line.setdefault((base, mode), line)
        entries = self.bounded.setdefault((base, mode), [])
        if not any(entry[0] == box for entry in entries):
            entries.append((box, reason, line))

    def add_everything(self, reason: str, line: int) -> None:
        """Record that all buffers may be read and written."""
        self.everything.setdefault(reason, line)

    def merge(self, other: Footprint) -> None:
        """Take in what another group of blocks does."""
        for key, pieces in other.pieces.items():
            mine = self.pieces.setdefault(key, {})
            for block_key, (block, threads) in pieces.items():
                if block_key in mine:
                    mine[block_key][1].extend(threads)
                else:
                    mine[block_key] = (block, threads)
        for place, boxes in other.boxes.items():
            self.add_boxes(place[1], place[0], boxes)
        for place, entries in other.bounded.items():
            for box, reason, line in entries:
                self.add_bounded(place[1], place[0], box, reason, line)
        for place, line in other.first_line.items():
            self.first_line[place] = min(line, self.first_line.get(place, line))
        for reason, line in other.everything.items():
            self.everything.setdefault(reason, line)
        for variable, line in other.variables.items():
            self.variables.setdefault(variable, line)

    def _piece(self, key: _Key, address: Known, length: int, mask: Bool) -> None:
        block, thread = address.block, address.thread
        if not mask.all():
            if mask.shape[0] == 1 and block.shape[1] == 1:
                thread = np.broadcast_to(thread, (1, mask.shape[1]))[mask][None, :]
            elif mask.shape[1] == 1 and block.shape[1] == 1:
                block = np.broadcast_to(block, (mask.shape[0], 1))[mask][:, None]
            else:
                laid_out = block + thread
                full = np.broadcast_shapes(laid_out.shape, mask.shape)
                thread = np.unique(np.broadcast_to(laid_out, full)[np.broadcast_to(mask, full)])[None, :]
                block = ZERO
        elif block.shape[1] > 1:
            thread = np.unique(block + thread)[None, :]
            block = ZERO
        if thread.size == 0 or block.size == 0:
            return
        origin = block.min()
        shifted = block - origin
        if not shifted.any():
            shifted = ZERO
        pieces = self.pieces.setdefault(key, {})
        form = shifted.tobytes()
        entry = pieces.setdefault(form, (shifted, []))
        entry[1].append((thread + origin, length))
        kept = self.kept.get((key, form), 0) + thread.size
        if kept > KEPT_LIMIT:
            starts, ends = _ranges(entry[1])
            entry[1][:] = [(starts, ends - starts)]
            kept = 0
        self.kept[key, form] = kept

    def accesses(self, buffer_bytes: Mapping[int, int]) -> tuple[PtxAccess, ...]:
        """Merge everything into accesses, ordered by buffer, reads first, sure ones first."""
        places = sorted({(key[0], key[1]) for key in self.pieces} | set(self.boxes) | set(self.bounded))
        found = [access for place in places for access in self._place(place[0], place[1], buffer_bytes)]
        return tuple(found)

    def _place(self, buffer: int, mode: Mode, buffer_bytes: Mapping[int, int]) -> Iterator[PtxAccess]:
        size = buffer_bytes.get(buffer, 0)
        line = self.first_line[buffer, mode]
        may, may_exact = _boxes(self.pieces.get((buffer, mode, False), {}))
        must, must_exact = _boxes(self.pieces.get((buffer, mode, True), {}))
        may.extend(self.boxes.get((buffer, mode), ()))
        may, must = union(may), union(must) if must_exact else []
        loose = self.bounded.get((buffer, mode), [])
        outside = any(box.low < 0 or box.high > size for box in may)
        if outside:
            loose = [*loose, (None, "an address is computed past the end of the buffer", line)]
            must = [box for box in must if box.low >= 0 and box.high <= size]
        proven = set(must) == set(may)
        if must:
            yield PtxAccess(
                buffer=buffer,
                mode=mode,
                must=True,
                boxes=tuple(within(must)),
                precision="exact",
                reason="",
                line=line,
            )
        kept = within(must)
        if loose:
            yield self._loosely(buffer, mode, may, loose, size)
        elif not proven or len(kept) < len(must):
            boxes, exact = cover(may)
            exact = exact and may_exact
            yield PtxAccess(
                buffer=buffer,
                mode=mode,
                must=False,
                boxes=tuple(boxes),
                precision="exact" if exact else "bounded",
                reason="" if exact else "too many separate ranges",
                line=line,
            )

    def _loosely(
        self, buffer: int, mode: Mode, may: list[Box], loose: list[tuple[Box | None, str, int]], size: int
    ) -> PtxAccess:
        boxes: tuple[Box, ...] | None = None
        reason, line = loose[0][1], loose[0][2]
        for box, why, where in loose:
            if box is None:
                reason, line = why, where
        if all(box is not None for box, _, _ in loose):
            clipped = [_clip(box, size) for box, _, _ in loose if box is not None]
            if all(box is not None for box in clipped):
                joined = union([*may, *(box for box in clipped if box is not None)])
                boxes = tuple(cover(joined)[0])
                if boxes == (Box.interval(0, size),):
                    boxes = None
        return PtxAccess(
            buffer=buffer, mode=mode, must=False, boxes=boxes, precision="bounded", reason=reason, line=line
        )


def _clip(box: Box, size: int) -> Box | None:
    if box.low >= 0 and box.high <= size:
        return box
    low, high = max(0, box.low), min(size, box.high)
    return Box.interval(low, high - low) if low < high else None


def _ranges(threads: Sequence[_Threads]) -> tuple[Int, Int]:
    """Everything that threads touch, as disjoint ascending ranges."""
    return merge(
        np.concatenate([thread.ravel() for thread, _ in threads]),
        np.concatenate([(thread + length).ravel() for thread, length in threads]),
    )


def _boxes(pieces: Mapping[bytes, tuple[Int, list[_Threads]]]) -> tuple[list[Box], bool]:
    """The boxes of each block part combined with the union of its thread parts, and whether they are exact: a
    combination too large to lay out is replaced by its bounds."""
    found: list[Box] = []
    exact = True
    for block, threads in pieces.values():
        starts, ends = _ranges(threads)
        points = np.unique(block)
        inner = boxes_of_intervals(starts, ends)
        outer = boxes_of_intervals(points, points + 1)
        if len(outer) * len(inner) <= BOXES_LIMIT:
            found.extend(
                Box.of(a.start + b.start, (*_points(a), *b.dims), b.run) for a in outer for b in inner
            )
        elif len(points) * len(starts) <= ROWS_LIMIT:
            rows = merge((points[:, None] + starts).ravel(), (points[:, None] + ends).ravel())
            found.extend(boxes_of_intervals(*rows))
        else:
            exact = False
            found.append(
                Box.interval(int(points[0] + starts[0]), int(points[-1] - points[0] + ends[-1] - starts[0]))
            )
    return found, exact


def _points(box: Box) -> tuple[tuple[int, int], ...]:
    """Dimensions of a box of single points; contiguous points are a dimension of stride one."""
    return (*box.dims, (box.run, 1)) if box.run > 1 else box.dims
