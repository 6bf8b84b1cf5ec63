"""Hazards between kernels, from their accesses in program order, by the rules of may and must.

Byte by byte: a read depends on every earlier write that may have left the byte (RAW); a write on every read since
the byte was last certainly overwritten (WAR) and on every write that may have left it (WAW). Only a must-write
overwrites for certain. Any other write may leave what was there, so it also reads it; where nothing was written
before, allocation is birth and there is nothing to read. :func:`find_hazards` computes this over boxes: exactly
where the boxes' rows can be laid out, and otherwise with edges to spare, never with one missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessera_core.deps.accesses import BOXES_LIMIT, merged
from tessera_core.deps.graph import Access, Edge, Hazard, Precision, looser, union_of_chains, weaker
from tessera_core.program.boxes import Box, ByteSet, covers, may_overlap
from tessera_core.program.ir import Evidence

CELLS = 4096
"""Equal parts of a buffer by which accesses are looked up."""

NARROW_CELLS = 64
"""Accesses that span more of them are compared with all."""


@dataclass(frozen=True, slots=True)
class Hazards:
    """``edges`` sorted, each with the ``precisions`` of its looser end; ``chains`` as in :meth:`Deps.chains`."""

    edges: tuple[Edge, ...]
    precisions: tuple[Precision, ...]
    chains: tuple[tuple[int, ...], ...]


def find_hazards(accesses: Iterable[Access], buffer_bytes: Sequence[int], homed: frozenset[int]) -> Hazards:
    """Hazards of one program.

    ``accesses``: of all kernels; those that hold for the traced content only are ignored. ``buffer_bytes[id]``:
    sizes. ``homed``: state buffers, whose writers their homes keep together, so that they make no chain.
    """
    per_buffer: dict[int, list[Access]] = defaultdict(list)
    written: set[int] = set()
    for access in accesses:
        if access.valid_for == "shapes" and access.boxes != ():
            per_buffer[access.buffer].append(access)
            if access.mode == "write":
                written.add(access.buffer)
    edges: dict[tuple[int, int, int, str], _Found] = {}
    groups: list[Sequence[int]] = []
    for buffer in sorted(written):
        timeline = _Timeline(buffer, buffer_bytes[buffer], edges)
        kernels: dict[int, list[Access]] = defaultdict(list)
        for access in per_buffer[buffer]:
            kernels[access.kernel].append(access)
        for kernel in sorted(kernels):
            timeline.add(kernels[kernel])
        if buffer not in homed:
            groups.extend(timeline.groups())
    ordered = [edges[key] for key in sorted(edges)]
    return Hazards(
        tuple(found.edge() for found in ordered),
        tuple(found.precision for found in ordered),
        union_of_chains(groups),
    )


def with_ties(hazards: Hazards, groups: Iterable[Sequence[int]]) -> Hazards:
    """Hazards whose chains also keep each of ``groups`` on one device."""
    return replace(hazards, chains=union_of_chains([*hazards.chains, *groups]))


@dataclass(slots=True)
class _Live:
    """An access, and what is left of it. ``alive`` None: too many rows to say exactly, so all of it counts.

    ``intact``: nothing of it was overwritten. ``exact``: all that was overwritten has been taken away.
    """

    access: Access
    boxes: tuple[Box, ...]
    low: int
    high: int
    alive: ByteSet | None
    intact: bool = True
    exact: bool = True
    killers: list[Box] = field(default_factory=list)  # overwrote some of it, but could not be taken away


@dataclass(slots=True)
class _Found:
    """An edge in the making; a pair of kernels may meet in several accesses."""

    program: int
    source: int
    destination: int
    buffer: int
    hazard: Hazard
    boxes: tuple[Box, ...] | None
    must: bool
    evidence: Evidence
    precision: Precision

    def edge(self) -> Edge:
        return Edge(
            program=self.program,
            source=self.source,
            destination=self.destination,
            buffer=self.buffer,
            hazard=self.hazard,
            boxes=self.boxes,
            must=self.must,
            evidence=self.evidence,
        )


class _Lives:
    """Accesses to one buffer, found by the bytes between their bounds, so that kernels that share a buffer piece by
    piece are not each compared with every other."""

    def __init__(self, size: int) -> None:
        self._cell = max(1, -(-size // CELLS))
        self._all: dict[int, _Live] = {}  # by age
        self._cells: dict[int, set[int]] = defaultdict(set)
        self._wide: set[int] = set()
        self._ages: dict[int, int] = {}  # by identity
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, live: _Live) -> None:
        """Enter the newest access."""
        age, self._next = self._next, self._next + 1
        self._all[age] = live
        self._ages[id(live)] = age
        for members in self._places(live):
            members.add(age)

    def remove(self, live: _Live) -> None:
        """Forget an access."""
        age = self._ages.pop(id(live))
        del self._all[age]
        for members in self._places(live):
            members.discard(age)

    def near(self, live: _Live) -> list[_Live]:
        """Those whose bounds meet its bounds, oldest first."""
        cells = self._span(live)
        if len(cells) > NARROW_CELLS:
            ages: Iterable[int] = self._all
        else:
            ages = sorted(self._wide.union(*(self._cells[cell] for cell in cells if cell in self._cells)))
        found = (self._all[age] for age in ages)
        return [other for other in found if other.low < live.high and live.low < other.high]

    def _span(self, live: _Live) -> range:
        return range(live.low // self._cell, (live.high - 1) // self._cell + 1)

    def _places(self, live: _Live) -> list[set[int]]:
        cells = self._span(live)
        return [self._wide] if len(cells) > NARROW_CELLS else [self._cells[cell] for cell in cells]


class _Timeline:
    """One buffer through the program: who may have written each byte last, and who has read it since."""

    def __init__(self, buffer: int, size: int, edges: dict[tuple[int, int, int, str], _Found]) -> None:
        self._buffer = buffer
        self._whole = (Box.interval(0, max(size, 1)),)
        self._edges = edges
        self._writers = _Lives(size)
        self._readers = _Lives(size)
        # A generation lasts from one write that replaces everything to the next.
        self._generation: list[int] = []
        self._inexact = False
        self._groups: list[Sequence[int]] = []

    def add(self, accesses: Sequence[Access]) -> None:
        """The accesses of the next kernel: what it reads comes before what it writes."""
        new = [self._live(access) for access in accesses]
        reads = [live for live in new if live.access.mode == "read"]
        writes = [live for live in new if live.access.mode == "write"]
        for live in new:
            if live.access.needs_content:
                self._meet(self._writers, live, "RAW")
        for live in writes:
            self._meet(self._writers, live, "WAW")
            self._meet(self._readers, live, "WAR")
        # Its own reads are overwritten by its own writes: whoever writes later meets it as a writer.
        for live in reads:
            self._readers.add(live)
        for live in writes:
            if live.access.must:
                self._kill(live)
        if writes:
            self._join(writes)

    def groups(self) -> list[Sequence[int]]:
        """Kernels of each generation that must share a device."""
        self._close()
        return self._groups

    def _live(self, access: Access) -> _Live:
        boxes = self._whole if access.boxes is None else access.boxes
        low, high = min(box.low for box in boxes), max(box.high for box in boxes)
        return _Live(access, boxes, low, high, ByteSet.of(boxes))

    def _meet(self, lives: _Lives, later: _Live, hazard: Hazard) -> None:
        earlier = lives.near(later)
        for index, live in enumerate(earlier):
            boxes, exact = _shared(live, later)
            if boxes == ():
                continue
            if hazard == "RAW" and not exact:  # what was overwritten would be shipped along
                self._inexact = True
            source, access = live.access, later.access
            unknown = source.boxes is None
            must = (
                hazard == "RAW"
                and exact
                and source.must
                and not unknown
                and not any(
                    other.access.kernel != source.kernel and _touch(other, boxes)
                    for other in earlier[index + 1 :]
                )
            )
            found = _Found(
                program=source.program,
                source=source.kernel,
                destination=access.kernel,
                buffer=self._buffer,
                hazard=hazard,
                boxes=None if unknown else boxes,
                must=must,
                evidence=weaker(source.evidence, access.evidence),
                precision=looser(source.precision, access.precision),
            )
            self._put(found)

    def _put(self, found: _Found) -> None:
        key = (found.source, found.destination, found.buffer, found.hazard)
        other = self._edges.get(key)
        if other is None:
            self._edges[key] = found
            return
        if other.boxes is None or found.boxes is None:
            other.boxes = None
        else:
            other.boxes = merged((*other.boxes, *found.boxes), widen=not (other.must and found.must))
        other.must = other.must and found.must
        other.evidence = weaker(other.evidence, found.evidence)
        other.precision = looser(other.precision, found.precision)

    def _kill(self, killer: _Live) -> None:
        """Take a must-write's bytes from all that came before it."""
        for lives in (self._writers, self._readers):
            for live in lives.near(killer):
                if not self._survives(live, killer, writer=lives is self._writers):
                    lives.remove(live)

    def _survives(self, live: _Live, killer: _Live, *, writer: bool) -> bool:
        if killer.alive is not None and live.alive is not None:
            left = live.alive - killer.alive
            if left.bytes < live.alive.bytes:
                live.alive, live.intact = left, False
            return bool(left)
        if not any(may_overlap(mine, other) for mine in live.boxes for other in killer.boxes):
            return True
        live.intact = live.exact = False
        live.killers.extend(killer.boxes)
        if all(covers(live.killers, box) for box in live.boxes):
            return False
        if writer:
            self._inexact = True
        return True

    def _join(self, writes: Sequence[_Live]) -> None:
        """Enter a kernel's writes; its must-writes have already killed."""
        if not self._writers:
            self._close()
        for live in writes:
            self._writers.add(live)
        self._generation.append(writes[0].access.kernel)
        self._inexact = self._inexact or any(not live.access.must for live in writes)

    def _close(self) -> None:
        if self._inexact and len(self._generation) > 1:
            self._groups.append(tuple(self._generation))
        self._generation = []
        self._inexact = False


def _shared(earlier: _Live, later: _Live) -> tuple[tuple[Box, ...], bool]:
    """Boxes of ``earlier`` that ``later`` may touch, and whether they hold nothing that has been overwritten."""
    inside = later.low <= earlier.low and earlier.high <= later.high
    if inside and earlier.intact and all(covers(later.boxes, box) for box in earlier.boxes):
        return earlier.boxes, True
    if earlier.alive is None or later.alive is None:
        touched = (box for box in earlier.boxes if any(may_overlap(box, other) for other in later.boxes))
        return tuple(touched), earlier.intact
    both = earlier.alive & later.alive
    if not both:
        return (), True
    if both == later.alive and len(later.boxes) <= len(earlier.boxes):
        return later.boxes, earlier.exact
    folded = both.to_boxes(BOXES_LIMIT)
    return (earlier.boxes, earlier.intact) if folded is None else (folded, earlier.exact)


def _touch(live: _Live, boxes: Sequence[Box]) -> bool:
    if live.alive is not None:
        union = ByteSet.of(boxes)
        if union is not None:
            return bool(live.alive & union)
    return any(may_overlap(mine, other) for mine in live.boxes for other in boxes)


def precision_counts(hazards: Hazards) -> Mapping[tuple[Evidence, Precision], int]:
    """Edges by the weaker evidence and the looser precision of their ends."""
    counts: dict[tuple[Evidence, Precision], int] = defaultdict(int)
    for edge, precision in zip(hazards.edges, hazards.precisions, strict=True):
        counts[edge.evidence, precision] += 1
    return counts
