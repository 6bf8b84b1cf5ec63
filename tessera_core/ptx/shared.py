"""What the shared memory of a block holds, cell by cell, where it matters for addresses: pointers and indices that
compilers and programs hand from thread to thread.

Race-free programs only are followed: two accesses to one cell, one of them a store, are ordered by a barrier or lie in
one thread. As long as the whole block meets at every barrier, whatever was stored before it has been stored here
too, so that a load finds what the program finds. Where a barrier is met by a part of the block, or threads may order
themselves by flags or memory barriers of their own (``ordered`` is false) and are not all at one step, nothing is
claimed any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera_core.ptx.fields import fields_of, join_fields
from tessera_core.ptx.kernel import SHARED
from tessera_core.ptx.values import (
    NUMBER,
    ZERO,
    Bool,
    Field,
    Int,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    hull,
    known,
    mixed,
    unknown,
)


class SharedMemory:
    """Cells by offset: size and value, which is the same for all threads. ``ordered``: barriers of the whole block
    are the only order between threads. ``version`` counts changes; with ``widen`` set, bounds that still move are
    dropped."""

    def __init__(self, shape: Shape, ordered: bool) -> None:
        self.shape = shape
        self.ordered = ordered
        self.cells: dict[int, tuple[int, Value]] = {}
        self.columns: dict[tuple[int, int], tuple[Known, Known]] = {}
        self.lost = False
        self.version = 0
        self.widen = False

    def lose(self) -> None:
        """Forget everything, for good."""
        self.version += not self.lost
        self.lost = True

    def store(
        self, address: Value, elements: Sequence[Value], size: int, can: Bool, must: Bool, together: bool
    ) -> None:
        """Record a store of ``elements`` of ``size`` bytes each. ``together``: the whole block is at this step."""
        if self.lost:
            return
        if not (together or self.ordered) or not _plain(address):
            self.lose()
            return
        assert isinstance(address, Known)
        surely = np.all(must, axis=0, keepdims=True)
        for start, threads in self._places(address, np.any(can, axis=0, keepdims=True)):
            sure = bool(surely[0, threads if surely.shape[1] > 1 else [0]].any())
            for index, element in enumerate(elements):
                value = self._joined([self._column(element, int(thread)) for thread in threads])
                self._put(start + index * size, size, value, sure)

    def load(self, address: Value, size: int, can: Bool, together: bool) -> Value | None:
        """What ``size`` bytes at ``address`` hold, None where that is not known."""
        if self.lost or not (together or self.ordered) or not _plain(address):
            return None
        assert isinstance(address, Known)
        places = self._places(address, np.any(can, axis=0, keepdims=True))
        held = [self._cell(start, size) for start, _ in places]
        if len(held) == 1:
            return held[0]
        first = held[0]
        if all(
            isinstance(value, Known) and isinstance(first, Known) and value.base == first.base
            for value in held
        ):
            return self._spread([value for value in held if isinstance(value, Known)], places)
        return self._joined(held)

    def _places(self, address: Known, able: Bool) -> list[tuple[int, Int]]:
        """Each start and the threads that access it."""
        width = self.shape.threads
        addresses = np.broadcast_to(address.block + address.thread, (1, width))[0]
        chosen = np.flatnonzero(np.broadcast_to(able, (1, width))[0])
        if address.thread.size == 1:
            return [(int(addresses[0]), chosen[:1] if able.size == 1 else chosen)]
        order = chosen[np.argsort(addresses[chosen], kind="stable")]
        edges = np.flatnonzero(np.diff(addresses[order])) + 1
        return [(int(addresses[group[0]]), group) for group in np.split(order, edges) if len(group)]

    def _column(self, value: Value, thread: int) -> Value:
        """The value that one thread has, as one for all threads."""
        if isinstance(value, Predicate):
            return unknown(8)
        if isinstance(value, Unknown):
            if not value.fields:
                return value
            fields = tuple(
                Field(self._known_column(field.source, thread), field.start, field.bits)
                for field in value.fields
            )
            return Unknown(value.bases, None, None, fields)
        return self._known_column(value, thread)

    def _known_column(self, value: Known, thread: int) -> Known:
        if value.thread.size == 1 and value.block.shape[1] == 1:
            return value
        key = (id(value), thread)
        if key not in self.columns:
            block = value.block if value.block.shape[1] == 1 else value.block[:, thread : thread + 1]
            offset = value.thread if value.thread.size == 1 else value.thread[:, thread : thread + 1]
            self.columns[key] = (value, known(block + offset, ZERO, value.base))
        return self.columns[key][1]

    def _joined(self, values: Sequence[Value]) -> Value:
        found = values[0]
        for value in values[1:]:
            found = hull(found, value, widen=False)
        return found

    def _put(self, start: int, size: int, value: Value, sure: bool) -> None:
        end = start + size
        before = self._cell(start, size) if not sure else value
        for other in range(start - 15, end):
            cell = self.cells.get(other)
            if cell is not None and other + cell[0] > start and (other, cell[0]) != (start, size):
                # a cell of another shape: its bytes keep no more than where they may point
                del self.cells[other]
                for byte in range(other, other + cell[0]):
                    if not start <= byte < end:
                        self.cells[byte] = (1, mixed((cell[1],), 8))
        new = value if sure else hull(before, value, self.widen)
        present = self.cells.get(start)
        self.version += present is None or present[1] is not new
        self.cells[start] = (size, new)

    def _cell(self, start: int, size: int) -> Value:
        exact = self.cells.get(start)
        if exact is not None and exact[0] == size:
            return exact[1]
        pieces: list[Value] = []
        fields: tuple[Field, ...] | None = ()
        at = start
        while at < start + size:
            cell = self.cells.get(at)
            if cell is None or at + cell[0] > start + size:
                fields = None
                pieces.extend(
                    held
                    for other, (n, held) in self.cells.items()
                    if other < start + size and other + n > start
                )
                break
            more = fields_of(cell[1], cell[0] * 8)
            fields = None if fields is None or more is None else (*fields, *more)
            pieces.append(cell[1])
            at += cell[0]
        return mixed(tuple(pieces), size * 8) if fields is None else join_fields(self.shape, fields, size * 8)

    def _spread(self, values: Sequence[Known], places: Sequence[tuple[int, Int]]) -> Value:
        """One value per place, for each thread that of its place."""
        columns = [value.block + value.thread for value in values]
        rows = max(column.shape[0] for column in columns)
        base = values[0].base
        index = np.zeros(self.shape.threads, dtype=np.int64)
        for number, (_, threads) in enumerate(places):
            index[threads] = number
        table = np.concatenate([np.broadcast_to(column, (rows, 1)) for column in columns], axis=1)
        offsets = table - table[:, :1]
        if (offsets == offsets[:1]).all():
            return known(table[:, :1], offsets[:1, index], base)
        if not self.shape.dense_allowed():
            return Unknown(NUMBER if base < 0 else frozenset({base}), int(table.min()), int(table.max()))
        return known(table[:, index], ZERO, base)


def _plain(address: Value) -> bool:
    return isinstance(address, Known) and address.base == SHARED and address.block.size == 1
