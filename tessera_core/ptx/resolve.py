"""Memory of which some content is known: a load from it gives the very values, so that addresses computed from
them are known too. What is found so holds for that content alone, and is good for estimates only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tessera_core.ptx.flow import Step
from tessera_core.ptx.kernel import Kernel
from tessera_core.ptx.memory import Memory
from tessera_core.ptx.parameters import LaunchShape
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.syntax import Name, Operand, Vector
from tessera_core.ptx.values import NO_BASE, Bool, Int, Known, Shape, Value, elementwise, known, width_of


class KnownMemory(Memory):
    """``content``: bytes by buffer, of buffers that the launch only reads."""

    def __init__(
        self,
        kernel: Kernel,
        launch: LaunchShape,
        shape: Shape,
        value: Callable[[Operand, int], Value],
        content: Mapping[int, bytes],
    ) -> None:
        super().__init__(kernel, launch, shape, value)
        self.content = content

    def loaded(self, step: Step, can: Bool, together: bool) -> Iterator[tuple[str, Value]]:
        """As :meth:`Memory.loaded`."""
        touch = step.effects.touches[0] if step.effects.touches else None
        size = type_bytes(step.parts[-1])
        if (
            step.parts[0] in ("ld", "ldu")
            and touch is not None
            and width_of(step.parts[-1]) in (8, 16, 32, 64)
        ):
            address = self.value(step.operands[touch.operand], 64)
            if isinstance(address, Known) and len(self.content.get(address.base, b"")) >= size:
                yield from self._read(step, address, size)
                return
        yield from super().loaded(step, can, together)

    def _read(self, step: Step, address: Known, size: int) -> Iterator[tuple[str, Value]]:
        content = np.frombuffer(self.content[address.base], dtype=np.uint8)
        signed = step.parts[-1][0] == "s"
        target = step.operands[0]
        elements = target.elements if isinstance(target, Vector) else (target,)
        for index, element in enumerate(elements):
            if not isinstance(element, Name):
                continue
            place = known(address.block + index * size, address.thread)

            def look_up(at: Int) -> Int:
                # Threads that are masked off may point anywhere; what they get is never used.
                rows = np.clip(at, 0, len(content) - size)[..., None] + np.arange(size)
                raw = np.ascontiguousarray(content[rows]).view(f"<{'i' if signed else 'u'}{size}")[..., 0]
                return raw.astype(np.int64)

            assert place.base == NO_BASE
            yield element.text, elementwise(self.shape, look_up, (place,), size * 8)
