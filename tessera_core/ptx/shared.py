"""Which buffers the pointers in shared memory point into, byte by byte.

Compilers exchange addresses between threads through shared memory (a layout change before an atomic). The store is
followed in program order while the whole block runs together, which is what every race-free program sees; as soon
as threads that have diverged store, nothing is claimed any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera_core.ptx.kernel import SHARED
from tessera_core.ptx.values import NUMBER, Bool, Int, Known, Value


class SharedMemory:
    """Bases per byte of the block's shared memory; bytes never stored hold numbers."""

    def __init__(self) -> None:
        self.bases: dict[int, frozenset[int]] = {}
        self.lost = False

    def store(
        self,
        address: Value,
        elements: Sequence[frozenset[int]],
        size: int,
        can: Bool,
        must: Bool,
        together: bool,
    ) -> None:
        """Record a store of ``elements`` of ``size`` bytes each. ``together``: the whole block is at this step."""
        if self.lost:
            return
        if not together or not _plain(address):
            self.lost = True
            return
        assert isinstance(address, Known)
        surely = np.all(must, axis=0, keepdims=True)
        for selected, replaces in ((surely, True), (np.any(can, axis=0, keepdims=True) & ~surely, False)):
            for start in _starts(address.block + address.thread, selected):
                for index, bases in enumerate(elements):
                    for byte in range(start + index * size, start + (index + 1) * size):
                        self.bases[byte] = bases if replaces else bases | self.bases.get(byte, NUMBER)

    def load(self, address: Value, size: int, can: Bool, together: bool) -> frozenset[int] | None:
        """What ``size`` bytes at ``address`` may point into, None where that is not known."""
        if self.lost or not together or not _plain(address):
            return None
        assert isinstance(address, Known)
        found: set[int] = set()
        for start in _starts(address.block + address.thread, np.any(can, axis=0, keepdims=True)):
            for byte in range(start, start + size):
                found |= self.bases.get(byte, NUMBER)
        return frozenset(found) or NUMBER


def _plain(address: Value) -> bool:
    return isinstance(address, Known) and address.base == SHARED and address.block.size == 1


def _starts(addresses: Int, selected: Bool) -> list[int]:
    width = (1, max(addresses.shape[1], selected.shape[1]))
    chosen = np.broadcast_to(addresses, width)[np.broadcast_to(selected, width)]
    return [int(start) for start in np.unique(chosen)]
