"""Which allocation an address in a launch's parameters belongs to, while that launch was being captured.

The allocator may hand the same bytes out twice during a capture. What was alive is known between two *marks*
(points of the host's program at which allocations, releases and graph nodes were counted), so an address is
looked up among the allocations that lived in the interval in which its launch was made.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tessera_formats.errors import UntracedLaunchError

# Addresses of CUDA's unified space lie in here; counts, strides and packed halves of parameters don't.
_LOWEST_ADDRESS = 1 << 32
_HIGHEST_ADDRESS = 1 << 57
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """Counts at one point: allocations and releases since the capture began, and the nodes so far."""

    allocated: int
    freed: int
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Interval:
    """Between two marks: allocations before ``allocated`` and not released before ``freed`` were alive."""

    freed: int
    allocated: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """An allocation: ordinals of its allocation (-1: before the capture) and release (None: never)."""

    start: int
    bytes: int
    born: int
    died: int | None

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.start + self.bytes

    def lives_in(self, interval: Interval) -> bool:
        """Whether it was alive at some point of the interval."""
        return self.born < interval.allocated and (self.died is None or self.died >= interval.freed)


@dataclass(frozen=True, slots=True)
class Owned:
    """Memory that holds a known buffer of the trace; ``bytes`` may include padding after it."""

    start: int
    bytes: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer in a parameter block. ``buffer`` None: ``workspace`` is an index into the capture's list."""

    offset: int
    buffer: int | None
    workspace: int | None
    byte_offset: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of no buffer that launches point into. ``scope``: ``kernel`` (allocated while capturing) or
    ``library`` (existed before, such as a matrix library's workspace)."""

    start: int
    bytes: int
    born: int
    scope: str


def lifetimes(events: Sequence[Mapping[str, Any]]) -> list[Lifetime]:
    """Allocations of the allocator's event log (``action``, ``addr``, ``size``), in order of birth."""
    found: list[Lifetime] = []
    alive: dict[int, int] = {}
    freed = 0
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = len(found)
            found.append(Lifetime(event["addr"], event["size"], len(found), None))
        elif event["action"] == "free_completed":
            index = alive.pop(event["addr"], None)
            if index is not None:
                old = found[index]
                found[index] = Lifetime(old.start, old.bytes, old.born, freed)
            freed += 1
    return found


def intervals(marks: Sequence[Mark]) -> dict[int, Interval]:
    """The interval in which each node was made; the first mark is before the capture's first node."""
    found: dict[int, Interval] = {}
    for before, after in pairwise(marks):
        for node in after.nodes - before.nodes:
            found[node] = Interval(before.freed, after.allocated)
    return found


@dataclass(slots=True)
class AddressBook:
    """Looks addresses up; remembers the scratch memory that it met.

    ``given``: buffers that exist before the capture. ``made``: what the capture returned. ``born``: allocations
    during it. ``standing``: blocks of the allocator that existed before. ``foreign``: asks the driver for the
    (start, bytes) of an allocation that is not the allocator's; None for what is no device address.
    """

    given: Sequence[Owned]
    made: Sequence[Owned]
    born: Sequence[Lifetime]
    standing: Sequence[Lifetime]
    foreign: Callable[[int], tuple[int, int] | None]
    scratch: list[Scratch] = field(default_factory=list)
    _sorted: list[Owned] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sorted = sorted(self.given, key=lambda owned: owned.start)

    def find(self, address: int, interval: Interval) -> tuple[int | None, int | None, int] | None:
        """(buffer, None, offset), (None, scratch, offset), or None for what is no device address.

        Raises :class:`UntracedLaunchError` where two allocations of the interval could be meant.
        """
        index = bisect_right(self._sorted, address, key=lambda owned: owned.start) - 1
        if index >= 0 and address < self._sorted[index].start + self._sorted[index].bytes:
            return self._sorted[index].buffer, None, address - self._sorted[index].start
        held = self._held(address, interval)
        if held is not None:
            for owned in self.made:
                if owned.start == held.start and held.died is None:
                    return owned.buffer, None, address - owned.start
            return self._scratch(held, "kernel", address)
        for life in self.standing:
            if life.start <= address < life.end:
                return self._scratch(life, "library", address)
        outside = self.foreign(address)
        if outside is None:
            return None
        return self._scratch(Lifetime(*outside, -1, None), "library", address)

    def _held(self, address: int, interval: Interval) -> Lifetime | None:
        """The allocation of the interval that an address lies in.

        A call may take a block, give it back and take parts of it again, or more. What overlaps then is one
        piece of memory: the last allocation where that covers it all, else one as large as all together.
        """
        alive = [life for life in self.born if life.lives_in(interval)]
        group: list[Lifetime] = []
        start, end, known = address, address + 1, -1
        while len(group) > known:
            known = len(group)
            group = [life for life in alive if life.start < end and life.end > start]
            start = min((life.start for life in group), default=start)
            end = max((life.end for life in group), default=end)
        if not group:
            return None
        last = max(group, key=lambda life: life.born)
        if (last.start, last.end) == (start, end):
            return last
        if any(life.died is None for life in group):
            # That one is used after the call too, where it is known by itself.
            raise UntracedLaunchError(
                f"a launch points to {address:#x}, which two allocations of one call held in turn;"
                " capture with --no-compile, or register the call as a custom op"
            )
        return Lifetime(start, end - start, last.born, last.died)

    def _scratch(self, life: Lifetime, scope: str, address: int) -> tuple[None, int, int]:
        entry = Scratch(life.start, life.bytes, life.born, scope)
        if entry not in self.scratch:
            self.scratch.append(entry)
        return None, self.scratch.index(entry), address - life.start


def pointers(
    parameters: bytes, offsets: Collection[int], book: AddressBook, interval: Interval
) -> tuple[bytes, tuple[Pointer, ...]]:
    """The parameter block with every device pointer zeroed, and what each pointed to.

    ``offsets``: where 8-byte words may lie (see :func:`word_offsets`).
    """
    block = bytearray(parameters)
    found = []
    for offset in sorted(offsets):
        (value,) = struct.unpack_from("<Q", block, offset)
        if not _LOWEST_ADDRESS <= value < _HIGHEST_ADDRESS:
            continue
        place = book.find(value, interval)
        if place is None:
            continue
        buffer, workspace, inner = place
        found.append(Pointer(offset, buffer, workspace, inner))
        block[offset : offset + _WORD_BYTES] = bytes(_WORD_BYTES)
    return bytes(block), tuple(found)


def word_offsets(size: int, layout: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets of the aligned 8-byte words inside parameters; of the whole block where the layout is unknown.

    Structures by value, tables of pointers and tensor maps (whose first word is the address) are all searched.
    """
    spans = layout or [(0, size)]
    return [
        offset
        for start, extent in spans
        for offset in range(-(-start // _WORD_BYTES) * _WORD_BYTES, start + extent - 7, _WORD_BYTES)
    ]
