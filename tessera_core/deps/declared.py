"""What a target's PTX does, against what the model's author declared: elsewhere a kernel runs by its declaration,
so the two may not contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.deps.accesses import Step, Touch
from tessera_core.deps.launches import Launch
from tessera_core.program.boxes import Box, ByteSet, covers
from tessera_core.program.ir import Kernel, Op, Program, Trace
from tessera_core.ptx.analysis import PtxAccess
from tessera_core.ptx.syntax import Module
from tessera_formats.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What is declared of an op (None: of all ops of a kernel whose launches stand for the whole)."""

    trace: Trace
    target: str
    program: Program
    kernel: Kernel
    op: Op | None
    touches: Sequence[Touch]

    def check_access(self, launch: Launch, module: Module, found: PtxAccess, buffer: int) -> None:
        """Refuse an access that is not declared.

        A write must be declared, and where the PTX gives its exact bytes, to these. A read must be of a buffer that
        is declared at all: what is written may also be read back.
        """
        same = [t for t in self.touches if t.buffer == buffer and t.valid_for == "shapes"]
        if found.mode == "read":
            if same:
                return
            problem = "reads it, but no access to it is declared"
        else:
            writes = [t for t in same if t.mode == "write"]
            if any(t.boxes is None for t in writes):
                return
            allowed = [box for t in writes for box in t.boxes or ()]
            if not writes:
                problem = "writes it, but it is declared as only read" if same else "writes it undeclared"
            elif found.precision == "exact" and any(_escapes(box, allowed) for box in found.boxes or ()):
                problem = "writes bytes of it outside what is declared as written"
            else:
                return
        declared = self.op.target if self.op else self.kernel.name
        raise ModelError(
            f"{self.program.name}: kernel {self.kernel.id} ({self.kernel.name}), {_parameter(module, launch, buffer)}"
            f" ({self._called(buffer)}): the PTX for {self.target} {problem} (line {found.line} of"
            f" {launch.function}); correct the declaration of {declared} and trace again"
        )

    def check_filled(self, found: Sequence[Step]) -> None:
        """Refuse a must-write that the launches in ``found``, which are the whole op, can't make."""
        for touch in self.touches:
            if not touch.must or touch.boxes is None or touch.valid_for == "content":
                continue
            writes = [
                t for step in found for t in step.touches if t.buffer == touch.buffer and t.mode == "write"
            ]
            if any(t.boxes is None for t in writes):
                continue
            allowed = [box for t in writes for box in t.boxes or ()]
            if any(_escapes(box, allowed) for box in touch.boxes):
                declared = self.op.target if self.op else self.kernel.name
                raise ModelError(
                    f"{self.program.name}: kernel {self.kernel.id} ({self.kernel.name}) is declared to fill"
                    f" {self._called(touch.buffer)}, but its PTX for {self.target} leaves bytes unwritten;"
                    f" declare {declared} without must for that argument and trace again"
                )

    def _called(self, buffer: int) -> str:
        return self.trace.buffers[buffer].name or f"buffer {buffer}"


def _escapes(box: Box, allowed: Sequence[Box]) -> bool:
    """Whether some byte of ``box`` certainly lies outside ``allowed``; false where there are too many rows to say."""
    if covers(allowed, box):
        return False
    mine, theirs = ByteSet.of([box]), ByteSet.of(allowed)
    return mine is not None and theirs is not None and bool(mine - theirs)


def _parameter(module: Module, launch: Launch, buffer: int) -> str:
    """The parameters that point into ``buffer``, as the entry numbers and names them."""
    entry = next(f for f in module.entries() if f.name == launch.function)
    offsets = {offset: name for name, offset in entry.parameter_offsets().items()}
    order = sorted(offsets)
    named = [
        f"argument {order.index(r.offset)} ({offsets[r.offset]})"
        for r in launch.relocations
        if r.buffer == buffer and r.offset in offsets
    ]
    return ", ".join(named) or "a structure argument"
