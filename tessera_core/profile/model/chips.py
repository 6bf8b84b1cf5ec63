"""Catalogued types as the physical model sees them: by what their makers state, never by what was measured.

Fitted coefficients are shares of stated rates, so that a GPU of which nothing was ever measured is modelled as well.
"""

from __future__ import annotations

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.physical import Chip


def chip_of(device: ModelledDevice, dtype: str) -> Chip:
    """The chip of ``device`` at ``dtype``; where its maker's rates are unknown, what its measured ones let expect."""
    kind, typical = device.type, device.catalogue
    if kind.datasheet is not None:
        memory = kind.datasheet.memory_bytes_per_s
    else:
        memory = device.memory().per_s / typical.memory.typical
    return Chip(
        flops_per_s=device.stated_flops_per_s(dtype),
        memory_bytes_per_s=memory,
        l2_bytes=kind.l2_bytes,
        multiprocessors=kind.multiprocessors,
    )
