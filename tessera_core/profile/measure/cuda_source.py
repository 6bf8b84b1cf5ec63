"""A trace ready to run on a device: values for its programs, a compiled function per signature, iterations to walk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from tessera_core.profile.measure.cuda_blocks import Call, free
from tessera_core.profile.measure.cuda_lab import Lab
from tessera_core.profile.measure.cuda_values import drawn_inputs, iteration_memory, shared_values
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.trace.capture.group import store_results
from tessera_core.trace.capture.session import Session
from tessera_formats.errors import TesseraError

Progress = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Source:
    """A trace ready to be run on a device: values, and a function per signature.

    ``unmeasured``: signatures that can't be compiled or run here, and why.
    """

    trace: Trace
    device: str
    session: Session
    shared: dict[int, torch.UntypedStorage]
    unmeasured: dict[str, str] = field(default_factory=dict)
    _calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    _draws: dict[tuple[int, int], dict[int, torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(trace: Trace, device: str, trusted: bool, compiled: bool = True) -> Source:
        """Values are made now; functions when asked for."""
        session = Session(trace=trace, device=device, compiled=compiled, trusted=trusted)
        shared = shared_values(trace, device, trusted)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)  # made on another stream than those that will read them
        return Source(trace=trace, device=device, session=session, shared=shared)

    def compile(self, lab: Lab, progress: Progress) -> None:
        """Run each program once, which compiles every signature."""
        for program in self.trace.programs:
            progress(f"compiling {program.name}")
            for _ in self.walk(lab, program):
                pass
            free(lab)

    def memory(self, program: Program) -> Memory:
        """Fresh inputs and state."""
        return iteration_memory(self.trace, program, self.shared, self.device)

    def walk(self, lab: Lab, program: Program) -> Iterator[tuple[Call | None, Kernel, Memory]]:
        """Run an iteration; stop before each kernel with the memory that it will find, and how to call it.

        None instead of a call: it can't run here, and what it would give is made up.
        """
        memory = lab.run(partial(self.memory, program))
        for kernel in program.kernels:
            call = self.call(program, kernel)
            yield call, kernel, memory
            try:
                if call is not None:
                    lab.run(partial(_run, call, memory))
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                self.unmeasured[kernel.signature] = reason(problem)
                call = None
            if call is None:
                _make_up(program, kernel, memory)

    def call(self, program: Program, kernel: Kernel) -> Call | None:
        """How to run a kernel; None for one that can't be."""
        if kernel.signature in self.unmeasured:
            return None
        key = (program.id, kernel.id)
        try:
            if key not in self._calls:
                group = self.session.group(program, kernel.id)
                self._calls[key] = (kernel, group, self.session.function(kernel.signature, group))
            return self._calls[key]
        except TesseraError as problem:
            self.unmeasured[kernel.signature] = reason(problem)
            return None

    def calls(self, program: Program) -> list[Call] | None:
        """All kernels of an iteration; None where one of them can't run."""
        found = [self.call(program, kernel) for kernel in program.kernels]
        whole = [call for call in found if call is not None]
        return whole if len(whole) == len(found) else None

    def draw(self, program: Program, number: int) -> dict[int, torch.Tensor]:
        """Bytes of batch ``number``'s inputs by buffer; kept, because drawing takes the host long."""
        key = (program.id, number)
        if key not in self._draws:
            values = drawn_inputs(self.trace, program, number)
            bound = program.bindings("input")
            self._draws[key] = {
                self.trace.tensors[bound[name].tensor].buffer: _bytes_of(value).to(self.device)
                for name, value in values.items()
            }
        return self._draws[key]


def _run(call: Call, memory: Memory) -> None:
    _, group, function = call
    store_results(group, memory, function(*group.arguments(memory)))


def _make_up(program: Program, kernel: Kernel, memory: Memory) -> None:
    """Ordinary values where a kernel that can't run here would have written: normal floats, integers 0."""
    for op in kernel.ops:
        for tensor in program.ops[op].outputs:
            reference = memory.trace.tensors[tensor]
            if not memory.is_bound(reference.buffer):
                size = memory.trace.buffers[reference.buffer].bytes
                memory.bind(
                    reference.buffer,
                    torch.zeros(size, dtype=torch.uint8, device=memory.device).untyped_storage(),
                )
                view = memory.view(tensor)
                if view.dtype.is_floating_point and view.dtype.itemsize > 1:
                    view.normal_()


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    size = value.untyped_storage().nbytes()
    return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage(), 0, (size,), (1,))


def reason(problem: Exception) -> str:
    """One line that says why a kernel can't run here."""
    line = str(problem).strip().partition("\n")[0]
    return line if isinstance(problem, TesseraError) else f"{type(problem).__name__}: {line}"
