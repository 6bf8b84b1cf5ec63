"""Loads from memory of which the content is known: the very values, so that addresses computed from them are known
too. What is found so holds for that content alone, and is good for estimates only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tessera_core.ptx.flow import Step
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.syntax import Name, Vector
from tessera_core.ptx.values import Int, Known, Shape, Value, elementwise, known, mixed, width_of


def stored_values(step: Step, place: Known, content: bytes, shape: Shape) -> Iterator[tuple[str, Value]]:
    """The destinations of a load at ``place``, an offset into ``content``, and what they then hold."""
    kind = step.parts[-1]
    size = type_bytes(kind)
    if step.parts[0] not in ("ld", "ldu") or width_of(kind) not in (8, 16, 32, 64) or len(content) < size:
        for name in step.writes:
            yield name, mixed(())
        return
    raw = np.frombuffer(content, dtype=np.uint8)
    number = np.dtype(f"<{'i' if kind[0] == 's' else 'u'}{size}")

    def look_up(at: Int) -> Int:
        # Threads that are masked off may point anywhere; what they get is never used.
        rows = np.clip(at, 0, len(raw) - size)[..., None] + np.arange(size)
        return np.ascontiguousarray(raw[rows]).view(number)[..., 0].astype(np.int64)

    target = step.operands[0]
    for index, element in enumerate(target.elements if isinstance(target, Vector) else (target,)):
        if isinstance(element, Name):
            offset = known(place.block + index * size, place.thread)
            yield element.text, elementwise(shape, look_up, (offset,), size * 8)
