"""What each single block of a launch touches: boxes as a function of the block's index, and whether blocks could
run apart from each other.

The interpreter's values are sums of a part by block and a part by thread, so that most kernels' blocks all touch
the same boxes, moved by a linear function of the index; the blocks at the edge of a tensor touch others. Orders of
blocks that are no linear function (swizzles) have no such boxes, but whether their bytes meet is decided all the
same, by laying every block's bytes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_core.program.boxes import Box
from tessera_core.ptx.compress import BOXES_LIMIT, boxes_of_intervals, merge
from tessera_core.ptx.flow import Flow, Step, visible
from tessera_core.ptx.footprint import Footprint, Mode
from tessera_core.ptx.values import Bool, Int, Known

# Pieces of one buffer and direction that a reader would still use; beyond, the blocks have no common form.
PIECES_LIMIT = 16

# Ranges of bytes, over all blocks, that are laid out to see whether blocks meet: about a tenth of a second.
RANGES_LIMIT = 1 << 20

# Bytes of addresses and masks that a launch may keep until its blocks are told apart.
KEPT_BYTES_LIMIT = 1 << 27

_Extent = tuple[int, int, int]
_Place = tuple[int, Mode, bool]  # buffer, direction, whether surely accessed


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFootprint:
    """What each block of ``first`` to ``last`` (inclusive, by axis) touches in a buffer: ``boxes``, which are those
    of block ``first``, moved by ``step`` bytes for every block along x, y and z.

    ``boxes`` None: no such form is known; ``first`` and ``last`` then span the grid. ``must`` (writes only): every
    byte is certainly written. Several of one buffer and direction add up.
    """

    buffer: int
    mode: Mode
    must: bool
    first: _Extent
    last: _Extent
    boxes: tuple[Box, ...] | None
    step: _Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Whether a launch's ``blocks`` could run apart: no byte is written by two of them, none reads what another
    writes, and none uses atomics on global memory. ``reason``: what stands against it; empty where they could."""

    blocks: int
    disjoint_writes: bool
    reads_apart: bool
    atomics: bool
    reason: str

    @property
    def independent(self) -> bool:
        """Whether the blocks could run apart."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks (linear indices) that touch the intervals ``lows`` to ``highs``, moved to each one's ``origins``."""

    blocks: Int
    origins: Int
    lows: Int
    highs: Int


class BlockRecorder(Footprint):
    """A footprint that also remembers which of ``blocks`` (linear indices) made each access, unless that would take
    more than ``allowed`` bytes (``full``)."""

    def __init__(self, blocks: Int, allowed: int) -> None:
        super().__init__()
        self.blocks = blocks
        self._sites: dict[_Place, list[tuple[Known, int, Bool]]] = {}
        self._places: dict[_Place, list[_Piece]] = {}
        self.together: set[tuple[int, Mode]] = set()  # accesses that are not told apart by block
        self._unsure: set[int] = set()  # buffers with writes that some thread may leave out
        self._kept: set[int] = set()  # the arrays that are remembered
        self.kept_bytes = 0
        self.allowed = allowed
        self.full = False

    def add(self, mode: Mode, address: Known, length: int, can: Bool, must: Bool, line: int) -> None:
        """As :meth:`Footprint.add`."""
        super().add(mode, address, length, can, must, line)
        self._keep(address.block, address.thread, can, *([must] if mode == "write" else []))
        if self.full:
            return
        self._sites.setdefault((address.base, mode, False), []).append((address, length, can))
        if mode == "write":
            if must.any():
                self._sites.setdefault((address.base, mode, True), []).append((address, length, must))
            if not (must is can or (must.shape == can.shape and bool((must == can).all()))):
                self._unsure.add(address.base)

    def _keep(self, *arrays: Int | Bool) -> None:
        if self.full:
            return
        for array in arrays:
            if id(array) not in self._kept:
                self._kept.add(id(array))
                self.kept_bytes += array.nbytes
        if self.kept_bytes > self.allowed:
            self.full = True
            self._sites.clear()
            self._kept.clear()

    def add_boxes(self, mode: Mode, base: int, boxes: list[Box]) -> None:
        """As :meth:`Footprint.add_boxes`: bytes of the blocks together."""
        super().add_boxes(mode, base, boxes)
        self.together.add((base, mode))

    def is_sure(self, buffer: int) -> bool:
        """Whether every write to ``buffer`` is certain."""
        return buffer not in self._unsure

    def by_place(self) -> dict[_Place, list[_Piece]]:
        """By buffer and direction, all accesses and the sure ones: blocks that touch alike, and what."""
        if not self._places:
            self._places = {place: list(self._pieces(sites)) for place, sites in self._sites.items()}
            self._sites = {}
        return self._places

    def _pieces(self, sites: Iterable[tuple[Known, int, Bool]]) -> Iterator[_Piece]:
        alike: dict[bytes, tuple[Int, Int, list[tuple[Int, int]]]] = {}
        uneven: list[tuple[Int, int, Bool]] = []
        count = len(self.blocks)
        for address, length, mask in sites:
            block, thread = address.block, address.thread
            if block.shape[1] > 1 or (mask.shape[0] > 1 and mask.shape[1] > 1):
                uneven.append((block + thread, length, mask))
                continue
            everywhere = np.broadcast_to(block[:, 0], (count,))
            active = np.broadcast_to(mask[:, 0], (count,)) if mask.shape[1] == 1 else np.ones(count, bool)
            offsets = thread[0] if mask.shape[1] == 1 else np.broadcast_to(thread[0], mask.shape[1:])[mask[0]]
            if not active.any() or offsets.size == 0:
                continue
            origins = everywhere[active]
            key = active.tobytes() + (origins - origins[0]).tobytes()
            entry = alike.setdefault(key, (self.blocks[active], origins, []))
            entry[2].append((offsets + (origins[0] - entry[1][0]), length))
        for blocks, origins, offsets_of in alike.values():
            lows = np.concatenate([offsets for offsets, _ in offsets_of])
            highs = np.concatenate([offsets + length for offsets, length in offsets_of])
            yield _piece(blocks, origins, *merge(lows, highs))
        if uneven:
            yield from self._by_block(uneven)

    def _by_block(self, sites: Sequence[tuple[Int, int, Bool]]) -> Iterator[_Piece]:
        """Blocks whose threads differ from block to block, each laid out, equal ones joined."""
        alike: dict[bytes, tuple[list[int], list[int], Int, Int]] = {}
        count = len(self.blocks)
        full = [
            (
                np.broadcast_to(address, (count, max(address.shape[1], mask.shape[1]))),
                length,
                np.broadcast_to(mask, (count, max(address.shape[1], mask.shape[1]))),
            )
            for address, length, mask in sites
        ]
        for row in range(count):
            starts = [address[row][mask[row]] for address, _, mask in full]
            lows = np.concatenate(starts)
            if not lows.size:
                continue
            highs = np.concatenate([s + length for s, (_, length, _) in zip(starts, full, strict=True)])
            lows, highs = merge(lows, highs)
            origin = int(lows[0])
            key = (lows - origin).tobytes() + (highs - origin).tobytes()
            entry = alike.setdefault(key, ([], [], lows - origin, highs - origin))
            entry[0].append(int(self.blocks[row]))
            entry[1].append(origin)
        for blocks, origins, lows, highs in alike.values():
            yield _Piece(np.array(blocks), np.array(origins), lows, highs)


def _piece(blocks: Int, origins: Int, lows: Int, highs: Int) -> _Piece:
    """Origins at the first byte, so that equal sets of bytes look equal."""
    first = int(lows[0])
    return _Piece(blocks, origins + first, lows - first, highs - first)


def block_footprints(recorders: Sequence[BlockRecorder], grid: _Extent) -> tuple[BlockFootprint, ...]:
    """The footprints of all blocks; where all writes to a buffer are sure, only as sure ones."""
    places: dict[_Place, list[list[_Piece]]] = defaultdict(list)
    loose: set[tuple[int, Mode]] = set()
    sure: dict[int, bool] = {}
    for recorder in recorders:
        for place, pieces in recorder.by_place().items():
            places[place].append(pieces)
            sure[place[0]] = sure.get(place[0], True) and recorder.is_sure(place[0])
        loose |= set(recorder.bounded) | recorder.together
    found: list[BlockFootprint] = []
    whole = (grid[0] - 1, grid[1] - 1, grid[2] - 1)
    for buffer, mode in sorted({(place[0], place[1]) for place in places} | loose):
        unbounded = (buffer, mode) in loose
        for must in (True, False):
            if not must and not unbounded and mode == "write" and sure[buffer]:
                continue
            pieces_by_group = places.get((buffer, mode, must), [])
            formed: list[BlockFootprint] | None = None
            if pieces_by_group and (must or not unbounded):
                formed = _formed(buffer, mode, must, pieces_by_group, grid)
            elif must:
                continue
            if formed is None:
                formed = [
                    BlockFootprint(
                        buffer=buffer,
                        mode=mode,
                        must=must,
                        first=(0, 0, 0),
                        last=whole,
                        boxes=None,
                        step=(0, 0, 0),
                    )
                ]
            found.extend(formed)
    return tuple(found)


def _formed(
    buffer: int, mode: Mode, must: bool, groups: Sequence[Sequence[_Piece]], grid: _Extent
) -> list[BlockFootprint] | None:
    """Pieces as boxes that move linearly; None where that fails."""
    # The n-th piece of a form in one group of blocks goes with the n-th of that form in the others.
    joined: dict[tuple[bytes, bytes, int], list[_Piece]] = defaultdict(list)
    for pieces in groups:
        seen: dict[tuple[bytes, bytes], int] = defaultdict(int)
        for piece in pieces:
            form = (piece.lows.tobytes(), piece.highs.tobytes())
            joined[(*form, seen[form])].append(piece)
            seen[form] += 1
    found: list[BlockFootprint] = []
    for alike in joined.values():
        whole = _concatenated(alike)
        together = _linear(whole, grid)
        spans = [together] if together is not None else [_linear(run, grid) for run in _runs(whole)]
        boxes = boxes_of_intervals(alike[0].lows, alike[0].highs)
        if len(boxes) > BOXES_LIMIT or len(found) + len(spans) > PIECES_LIMIT:
            return None
        for span in spans:
            if (
                span is None or span[2] < 0
            ):  # a negative address is past the buffer, which the launch's access says
                return None
            first, last, origin, step = span
            found.append(
                BlockFootprint(
                    buffer=buffer,
                    mode=mode,
                    must=must,
                    first=first,
                    last=last,
                    boxes=tuple(box.shifted(origin) for box in boxes),
                    step=step,
                )
            )
    return sorted(set(found), key=lambda piece: (piece.first, piece.last, str(piece.boxes)))


def _concatenated(pieces: Sequence[_Piece]) -> _Piece:
    if len(pieces) == 1:
        return pieces[0]
    blocks = np.concatenate([piece.blocks for piece in pieces])
    order = np.argsort(blocks)
    origins = np.concatenate([piece.origins for piece in pieces])
    return _Piece(blocks[order], origins[order], pieces[0].lows, pieces[0].highs)


def _runs(piece: _Piece) -> list[_Piece]:
    """A piece cut, from the left, into runs of consecutive blocks at equal distances."""
    cuts = [0]
    for index in range(2, len(piece.blocks) + 1):
        start = cuts[-1]
        if index == len(piece.blocks) or index - start < 2:
            continue
        follows = piece.blocks[index] == piece.blocks[index - 1] + 1 == piece.blocks[start] + index - start
        even = (
            piece.origins[index] - piece.origins[index - 1] == piece.origins[start + 1] - piece.origins[start]
        )
        if not (follows and even):
            cuts.append(index)
            if len(cuts) > PIECES_LIMIT:
                break
    ends = [*cuts[1:], len(piece.blocks)]
    return [
        _Piece(piece.blocks[low:high], piece.origins[low:high], piece.lows, piece.highs)
        for low, high in zip(cuts, ends, strict=True)
    ]


def _linear(piece: _Piece, grid: _Extent) -> tuple[_Extent, _Extent, int, _Extent] | None:
    """(first block, last block, origin of the first, bytes per block by axis) where a piece's blocks are a cuboid
    and their origins are linear in their indices."""
    x = piece.blocks % grid[0]
    y = piece.blocks // grid[0] % grid[1]
    z = piece.blocks // (grid[0] * grid[1])
    first = int(x.min()), int(y.min()), int(z.min())
    last = int(x.max()), int(y.max()), int(z.max())
    extents = [high - low + 1 for low, high in zip(first, last, strict=True)]
    if extents[0] * extents[1] * extents[2] != len(piece.blocks):
        return None
    # Blocks ascend, so a cuboid's are in the order of (z, y, x).
    cube = piece.origins.reshape(extents[2], extents[1], extents[0])
    origin = int(cube[0, 0, 0])
    step = (
        int(cube[0, 0, 1]) - origin if extents[0] > 1 else 0,
        int(cube[0, 1, 0]) - origin if extents[1] > 1 else 0,
        int(cube[1, 0, 0]) - origin if extents[2] > 1 else 0,
    )
    linear = origin + step[0] * (x - first[0]) + step[1] * (y - first[1]) + step[2] * (z - first[2])
    return (first, last, origin, step) if np.array_equal(linear, piece.origins) else None


def _meets_cluster(step: Step) -> bool:
    """Whether a step has to do with other blocks of a cluster. ``shared::cluster`` alone has not: single blocks spell
    their own shared memory so."""
    return (
        step.parts[0] == "mapa"
        or step.parts[:2] == ("barrier", "cluster")
        or "multicast::cluster" in step.parts
    )


def split_of(recorders: Sequence[BlockRecorder] | None, total: Footprint, flow: Flow, grid: _Extent) -> Split:
    """Whether the blocks could run apart. ``recorders`` None: blocks were not told apart."""
    blocks = grid[0] * grid[1] * grid[2]
    atomics = any(
        step.parts[0] in ("atom", "red", "multimem") or step.parts[:2] == ("cp", "reduce")
        for step in flow.steps
        if any(touch.writes and (touch.tensor or visible(touch.space)) for touch in step.effects.touches)
    )
    disjoint = apart = False
    reason = ""
    if total.everything:
        why, line = next(iter(total.everything.items()))
        reason = f"{why} (line {line})"
    elif any(step.effects.cancels_blocks for step in flow.steps):
        reason = "blocks may take over each other's work"
    elif any(_meets_cluster(step) for step in flow.steps):
        reason = "the blocks of a cluster share memory"
    elif stored := [(name, line) for (name, mode), line in total.variables.items() if mode == "write"]:
        reason = f"blocks may meet in the module variable {stored[0][0]} (line {stored[0][1]})"
    elif recorders is None:
        reason = "too many blocks to tell apart"
    else:
        disjoint, apart, reason = _meetings(recorders, total)
    if atomics and not reason:
        reason = "atomics on global memory"
    return Split(blocks=blocks, disjoint_writes=disjoint, reads_apart=apart, atomics=atomics, reason=reason)


def _meetings(recorders: Sequence[BlockRecorder], total: Footprint) -> tuple[bool, bool, str]:
    """Whether no byte is written by two blocks, whether none is read that another writes, and what is not so."""
    pieces: dict[tuple[int, Mode], list[_Piece]] = defaultdict(list)
    for recorder in recorders:
        for (buffer, mode, sure), found in recorder.by_place().items():
            if not sure:
                pieces[buffer, mode].extend(found)
    together = {place for recorder in recorders for place in recorder.together}
    written = {buffer for buffer, mode in (*pieces, *total.bounded, *together) if mode == "write"}
    disjoint, apart, reason = True, True, ""
    for buffer in sorted(written):
        if (buffer, "write") in total.bounded:
            _, why, line = total.bounded[buffer, "write"][0]
            return False, False, f"a write is not bounded by block: {why} (line {line})"
        if (buffer, "write") in together or (buffer, "read") in together:
            return False, False, f"boxes of a tensor map (line {total.first_line[buffer, 'write']})"
        writes = _ranges(pieces[buffer, "write"])
        reads = _ranges(pieces.get((buffer, "read"), []))
        if writes is None or reads is None:
            return False, False, "too many separate ranges to compare block by block"
        line = total.first_line[buffer, "write"]
        if _collide(writes):
            disjoint, reason = False, reason or f"several blocks may write the same bytes (line {line})"
        if (buffer, "read") in total.bounded:
            _, why, line = total.bounded[buffer, "read"][0]
            apart = False
            reason = reason or f"a read of what is written is not bounded by block: {why} (line {line})"
        elif _read_elsewhere(writes, reads):
            apart, reason = False, reason or f"a block may read what another writes (line {line})"
    return disjoint, apart, reason


def _ranges(pieces: Sequence[_Piece]) -> tuple[Int, Int, Int] | None:
    """Every range of bytes as (lows, highs, block), ascending; None where there are too many."""
    if sum(len(piece.blocks) * len(piece.lows) for piece in pieces) > RANGES_LIMIT:
        return None
    empty = np.empty(0, dtype=np.int64)
    lows = np.concatenate([empty, *((p.origins[:, None] + p.lows).ravel() for p in pieces)])
    highs = np.concatenate([empty, *((p.origins[:, None] + p.highs).ravel() for p in pieces)])
    owners = np.concatenate([empty, *(np.repeat(p.blocks, len(p.lows)) for p in pieces)])
    order = np.argsort(lows, kind="stable")
    return lows[order], highs[order], owners[order]


def _collide(ranges: tuple[Int, Int, Int]) -> bool:
    """Whether ranges of two blocks share a byte."""
    lows, highs, owners = ranges
    if len(lows) < 2:
        return False
    reach = np.maximum.accumulate(highs)
    # Joined runs of overlapping ranges must each belong to one block.
    runs = np.concatenate([[0], np.cumsum(lows[1:] >= reach[:-1])])
    firsts = np.searchsorted(runs, runs, side="left")
    return bool(np.any(owners != owners[firsts]))


def _read_elsewhere(writes: tuple[Int, Int, Int], reads: tuple[Int, Int, Int]) -> bool:
    """Whether a block reads a byte that another one writes; where writes collide, some block may."""
    lows, highs, owners = writes
    if not len(lows) or not len(reads[0]):
        return False
    if _collide(writes):
        reach = np.maximum.accumulate(highs)
        return bool(
            np.any(
                np.searchsorted(lows, reads[1], side="left") > np.searchsorted(reach, reads[0], side="right")
            )
        )
    reach = np.maximum.accumulate(highs)
    first = np.searchsorted(reach, reads[0], side="right")
    last = np.searchsorted(lows, reads[1], side="left")
    meets = last > first
    changes = np.concatenate([[0], np.cumsum(owners[1:] != owners[:-1])])
    first, last, readers = first[meets], last[meets] - 1, reads[2][meets]
    return bool(np.any((owners[first] != readers) | (changes[first] != changes[last])))
