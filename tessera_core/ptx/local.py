"""What the private memory of each thread holds: local variables, spilled registers, and the parameters of calls.

Contents are kept per cell (offset and size), each a value for all threads as in a register. A store to a known
offset replaces its cell for the threads that execute it; one to offsets that differ between threads does so
offset by offset; any other may have gone to every place that it could reach. Bytes never stored hold nothing that a
program without undefined behaviour could rely on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera_core.ptx.fields import Fields, fields_of, join_fields, select_bits
from tessera_core.ptx.predicates import both, choose
from tessera_core.ptx.values import (
    Bool,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    bases_of,
    hull,
    mixed,
)

# Offsets of one access that are told apart.
_OFFSETS_LIMIT = 64

# A cell's old value (None: nothing yet), what is stored, and by which threads.
Merge = Callable[[Value | None, Value, Bool, Bool], Value]


class LocalMemory:
    """``merge`` gives what a place holds after a store by the threads that can, and those that must, execute it.

    ``version`` counts the changes that ``merge`` doesn't see.
    """

    def __init__(self, shape: Shape, merge: Merge) -> None:
        self.shape = shape
        self.merge = merge
        self.cells: dict[int, tuple[int, Value]] = {}
        # stores that may have gone to any byte of an interval (None: anywhere)
        self.blurred: dict[tuple[int, int] | None, tuple[int, Value]] = {}
        self.lost = False
        self.version = 0

    def store(self, address: Value, value: Value, size: int, can: Bool, must: Bool) -> None:
        """``size`` bytes of ``value`` at ``address``."""
        if self.lost or isinstance(value, Predicate):
            return
        value = select_bits(self.shape, value, 0, size * 8) if size < 8 else value
        offsets = self._offsets(address, can)
        if offsets is None:
            place = _interval(address, size)
            before = self.blurred.get(place)
            same = before is not None and before[0] == size
            held = self.merge(before[1] if same and before else value, value, can, np.zeros_like(must))
            self.version += before is None or not same
            self.blurred[place] = (size, held if same or before is None else _bases_only(before[1], value))
            return
        for offset, here in offsets:
            able = can if here is None else both(self.shape, can, here)
            sure = must if here is None else both(self.shape, must, here)
            old = self._cell(offset, size)
            self._carve(offset, size)
            self.cells[offset] = (size, self.merge(old, value, able, sure))

    def load(self, address: Value, size: int, can: Bool) -> Value | None:
        """What ``size`` bytes at ``address`` hold, as a signed number of that width or a pointer; None: unknown."""
        if self.lost:
            return None
        offsets = self._offsets(address, can)
        found: Value | None = None
        if offsets is None:
            low, high = _interval(address, size) or (None, None)
            for offset, (cell, value) in self.cells.items():
                if (low is None or offset + cell > low) and (high is None or offset < high):
                    held = value if cell == size else mixed((value,), size * 8)
                    found = held if found is None else hull(found, held, widen=False)
            return self._with_blurred(found, None if low is None or high is None else (low, high), size)
        for offset, here in offsets:
            value_here = self._with_blurred(self._cell(offset, size), (offset, offset + size), size)
            if value_here is None:
                return None
            if found is None or here is None:
                found = value_here
            else:
                found = choose(self.shape, Predicate(here, ~here), value_here, found)
        return found

    def lose(self) -> None:
        """Forget everything: someone who may know its address may have written to it."""
        self.version += not self.lost
        self.lost = True

    def _offsets(self, address: Value, can: Bool) -> list[tuple[int, Bool | None]] | None:
        """The offsets that threads of ``can`` may access, and which of them access each (None: all)."""
        if not isinstance(address, Known):
            return None
        if address.low == address.high:
            return [(address.low, None)]
        if address.block.size > 1 and address.thread.size > 1 and not self.shape.dense_allowed():
            return None
        places = address.block + address.thread
        full = np.broadcast_shapes(places.shape, can.shape)
        unique = np.unique(np.broadcast_to(places, full)[np.broadcast_to(can, full)])
        if len(unique) > _OFFSETS_LIMIT:
            return None
        return [(int(offset), places == offset) for offset in unique]

    def _cell(self, offset: int, size: int) -> Value | None:
        """Contents of ``size`` bytes put together from the cells that they lie in, None where some are missing."""
        exact = self.cells.get(offset)
        if exact is not None and exact[0] == size:
            return exact[1]
        pieces: list[Value] = []
        fields: Fields | None = ()
        at = offset
        while at < offset + size:
            cell = next(
                ((start, n, held) for start, (n, held) in self.cells.items() if start <= at < start + n), None
            )
            if cell is None:
                return mixed(tuple(pieces), size * 8) if pieces else None
            start, length, value = cell
            end = min(start + length, offset + size)
            piece = value
            if (at, end) != (start, start + length):
                piece = select_bits(self.shape, value, (at - start) * 8, (end - at) * 8)
            more = fields_of(piece, (end - at) * 8)
            fields = None if fields is None or more is None else (*fields, *more)
            pieces.append(piece)
            at = end
        return mixed(tuple(pieces), size * 8) if fields is None else join_fields(self.shape, fields, size * 8)

    def _carve(self, offset: int, size: int) -> None:
        """Cut other cells at the edges of ``[offset, offset + size)`` and remove what lies inside."""
        end = offset + size
        for start, (length, value) in list(self.cells.items()):
            if start + length <= offset or start >= end or (start, length) == (offset, size):
                continue
            del self.cells[start]
            for low, high in ((start, offset), (end, start + length)):
                if low < high:
                    piece = select_bits(self.shape, value, (low - start) * 8, (high - low) * 8)
                    self.cells[low] = (high - low, piece)

    def _with_blurred(self, found: Value | None, place: tuple[int, int] | None, size: int) -> Value | None:
        for where, (length, value) in self.blurred.items():
            if where is not None and place is not None and (where[1] <= place[0] or place[1] <= where[0]):
                continue
            held = value if length == size else mixed((value,), size * 8)
            found = held if found is None else hull(found, held, widen=False)
        return found


def _interval(address: Value, size: int) -> tuple[int, int] | None:
    if isinstance(address, Predicate) or address.low is None or address.high is None:
        return None
    return address.low, address.high + size


def _bases_only(first: Value, second: Value) -> Value:
    return Unknown(bases_of(first) | bases_of(second), None, None)
