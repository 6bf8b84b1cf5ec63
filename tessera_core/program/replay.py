"""Executing a program's kernels from the record alone, on one device, with nothing but the memory given.

Each kernel is prepared once: operators resolved, arguments decoded, and one small closure per op. A call then
only fills tensors into argument templates, so that replay costs little more than eager execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tessera_core.program.ir import Op, Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.program.operators import (
    Operator,
    Template,
    decode_arguments,
)
from tessera_core.program.user_code import is_custom, on_cpu, recorded_operator, triton_implementation
from tessera_formats.errors import ArtifactError, TesseraError

Step = Callable[[Memory, list[torch.Tensor | None]], None]

TRITON = "triton."
"""Prefix of the target of an op that is a raw Triton launch."""


class KernelRunner:
    """One kernel of a program, ready to be called on any :class:`Memory` of its device.

    After a call, every buffer that the kernel writes and that outlives it is ``memory.storage(buffer)``, laid
    out as recorded. Raises :class:`TrustError` for user code without ``trusted``, and :class:`ArtifactError`
    for a record that cannot be replayed, when built or when called.
    """

    __slots__ = ("_local", "_ops", "_steps", "kernel")

    def __init__(
        self,
        trace: Trace,
        program: Program,
        kernel_id: int,
        trusted: bool = False,
        device: str = "cpu",
        local: Sequence[int] | None = None,
    ) -> None:
        self.kernel = program.kernels[kernel_id]
        self._ops = [program.ops[op] for op in self.kernel.ops]
        place = torch.device(device)
        self._steps = [_step(trace, program, op, trusted, place) for op in self._ops]
        self._local = tuple(local_buffers(trace, program)[kernel_id] if local is None else local)

    def __call__(self, memory: Memory) -> None:
        """Execute the kernel's ops on ``memory``."""
        views = memory.views
        done = 0
        try:
            for step in self._steps:
                step(memory, views)
                done += 1
        except TesseraError:
            raise
        except Exception as problem:
            reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
            op = self._ops[done]
            raise ArtifactError(
                f"kernel {self.kernel.id} ({self.kernel.name}), op {op.id} ({op.target}): fails in replay:"
                f" {reason}; check the inputs, or trace again"
            ) from problem
        for buffer in self._local:
            if buffer not in memory.fixed:
                memory.release(buffer)


class ProgramRunner:
    """All kernels of a program in program order: the unpartitioned reference."""

    __slots__ = ("_kernels", "program")

    def __init__(self, trace: Trace, program: Program, trusted: bool = False, device: str = "cpu") -> None:
        self.program = program
        kernels = range(len(program.kernels))
        self._kernels = list(kernel_runners(trace, program, kernels, trusted, device).values())

    def __call__(self, memory: Memory) -> None:
        """Execute one iteration on ``memory``."""
        for kernel in self._kernels:
            kernel(memory)


def kernel_runners(
    trace: Trace, program: Program, kernels: Iterable[int], trusted: bool = False, device: str = "cpu"
) -> dict[int, KernelRunner]:
    """Runners of several kernels, in the order given; the program is analysed once for all of them."""
    local = local_buffers(trace, program)
    return {
        kernel: KernelRunner(trace, program, kernel, trusted, device, local[kernel]) for kernel in kernels
    }


def run_program(trace: Trace, program: Program, memory: Memory, trusted: bool = False) -> None:
    """Execute one iteration; build a :class:`ProgramRunner` instead where several follow."""
    ProgramRunner(trace, program, trusted, str(memory.device))(memory)


def local_buffers(trace: Trace, program: Program) -> list[list[int]]:
    """Per kernel, the buffers that no other kernel and no input, output or state touches."""
    owner: dict[int, int | None] = {trace.tensors[binding.tensor].buffer: None for binding in program.io}
    for op in program.ops:
        for tensor in (*op.inputs, *op.outputs):
            buffer = trace.tensors[tensor].buffer
            if owner.setdefault(buffer, op.kernel) != op.kernel:
                owner[buffer] = None
    local: list[list[int]] = [[] for _ in program.kernels]
    for buffer, kernel in owner.items():
        if kernel is not None and trace.buffers[buffer].kind in ("activation", "workspace"):
            local[kernel].append(buffer)
    return local


def _step(trace: Trace, program: Program, op: Op, trusted: bool, device: torch.device) -> Step:
    where = f"{program.name}, op {op.id} ({op.target})"
    for tensor in (*op.inputs, *op.outputs):
        if not 0 <= tensor < len(trace.tensors):
            raise ArtifactError(f"{where}: tensor {tensor} is not one of this trace; trace again")
    template = decode_arguments(op.arguments, tensors=len(trace.tensors), device=device, where=where)
    unlisted = set(template.tensors) - set(op.inputs)
    if unlisted:
        raise ArtifactError(f"{where}: uses tensor {min(unlisted)}, which its inputs lack; trace again")
    if op.target.startswith(TRITON):
        return _launch_step(trace, op, template, trusted, where)
    overload = recorded_operator(op, trace, trusted)
    run = on_cpu(overload) if is_custom(op.target) and device.type == "cpu" else overload
    arguments = {trace.tensors[tensor].buffer for tensor in op.inputs}
    fresh = [tensor for tensor in op.outputs if trace.tensors[tensor].buffer not in arguments]
    if not fresh:
        return _in_place_step(run, template)
    may_alias = any(result.alias_info is not None for result in overload._schema.returns)
    if len(op.outputs) == 1 and not may_alias and not (template.nested or template.named_nested):
        return _single_step(trace, run, template, fresh[0])
    return _general_step(trace, run, template, op.outputs, frozenset(fresh), may_alias, where)


def _filler(template: Template) -> Callable[[Memory], tuple[list[object], dict[str, object]]]:
    """A function that gives a call's arguments; the general form, lists of tensors included."""

    def fill(memory: Memory) -> tuple[list[object], dict[str, object]]:
        view = memory.view
        positional, named = template.positional.copy(), template.named.copy()
        for position, tensor in template.holes:
            positional[position] = view(tensor)
        for name, tensor in template.named_holes:
            named[name] = view(tensor)
        for position, tensors in template.nested:
            positional[position] = [None if tensor is None else view(tensor) for tensor in tensors]
        for name, tensors in template.named_nested:
            named[name] = [None if tensor is None else view(tensor) for tensor in tensors]
        return positional, named

    return fill


def _in_place_step(overload: Operator, template: Template) -> Step:
    """An op that only writes its arguments; what it returns is one of them."""
    fill = _filler(template)

    def step(memory: Memory, views: list[torch.Tensor | None]) -> None:
        positional, named = fill(memory)
        overload(*positional, **named)

    return step


def _single_step(trace: Trace, overload: Operator, template: Template, output: int) -> Step:
    """The common case, written out for speed: one fresh result, tensors as direct arguments."""
    reference = trace.tensors[output]
    buffer, stride, offset = reference.buffer, reference.stride, reference.offset
    shape = torch.Size(reference.shape)
    constants, constant_names = template.positional, template.named
    holes, named_holes = template.holes, template.named_holes

    def step(memory: Memory, views: list[torch.Tensor | None]) -> None:
        positional = constants.copy()
        for position, tensor in holes:
            view = views[tensor]
            positional[position] = memory.view(tensor) if view is None else view
        if named_holes:
            named = constant_names.copy()
            for name, tensor in named_holes:
                named[name] = memory.view(tensor)
            result = overload(*positional, **named)
        else:
            result = overload(*positional, **constant_names)
        if (
            result.stride() != stride
            or result.shape != shape
            or result.storage_offset() != offset
            or buffer in memory.fixed
        ):
            _settle(memory, output, result)
            return
        for stale in memory.tensors_of[buffer]:
            views[stale] = None
        views[output] = memory.bases[buffer] = result

    return step


def _general_step(
    trace: Trace,
    overload: Operator,
    template: Template,
    outputs: tuple[int, ...],
    fresh: frozenset[int],
    may_alias: bool,
    where: str,
) -> Step:
    """Any op: several results, results that share a storage, lists of tensors, possible aliases."""
    fill = _filler(template)
    shared = len({trace.tensors[tensor].buffer for tensor in fresh}) < len(fresh)

    def step(memory: Memory, views: list[torch.Tensor | None]) -> None:
        positional, named = fill(memory)
        results = _tensors_in(overload(*positional, **named))
        if len(results) != len(outputs):
            raise ArtifactError(f"{where}: returns {len(results)} tensors, not {len(outputs)}; trace again")
        defined: set[int] = set()
        for tensor, result in zip(outputs, results, strict=True):
            if tensor not in fresh:
                continue
            buffer = trace.tensors[tensor].buffer
            if shared and buffer not in defined and buffer not in memory.fixed:
                memory.bind(buffer, _storage_like(memory, buffer))
            defined.add(buffer)
            if shared:
                memory.view(tensor).copy_(result)
            else:
                _settle(memory, tensor, result, may_alias)

    return step


def _settle(memory: Memory, tensor: int, result: torch.Tensor, may_alias: bool = False) -> None:
    """Store a fresh result under the layout that the trace recorded, copying only where that differs."""
    reference = memory.trace.tensors[tensor]
    if tuple(result.shape) != reference.shape or str(result.dtype)[6:] != reference.dtype:
        raise ArtifactError(
            f"tensor {tensor}: is {result.dtype} {tuple(result.shape)} in replay, {reference.dtype}"
            f" {reference.shape} in the trace; trace again"
        )
    if reference.buffer in memory.fixed:
        memory.view(tensor).copy_(result)
        return
    steps = zip(reference.shape, result.stride(), reference.stride, strict=True)
    same = all(extent <= 1 or found == recorded for extent, found, recorded in steps)
    whole = result.untyped_storage().nbytes() >= memory.trace.buffers[reference.buffer].bytes
    if may_alias or not (same and whole and result.storage_offset() == reference.offset):
        memory.bind(reference.buffer, _storage_like(memory, reference.buffer))
        memory.view(tensor).copy_(result)
        return
    memory.define(tensor, result)


def _storage_like(memory: Memory, buffer: int) -> torch.UntypedStorage:
    size = memory.trace.buffers[buffer].bytes
    return torch.empty(size, dtype=torch.uint8, device=memory.device).untyped_storage()


def _tensors_in(result: object) -> list[torch.Tensor]:
    """The tensors that an operator returned, flattened in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for entry in result for tensor in _tensors_in(entry)]
    return []


def _launch_step(trace: Trace, op: Op, template: Template, trusted: bool, where: str) -> Step:
    """A raw Triton launch, executed by the CPU implementation that its author declared."""
    implementation = triton_implementation(op, trace, trusted, where)
    fill = _filler(template)

    def step(memory: Memory, views: list[torch.Tensor | None]) -> None:
        positional, named = fill(memory)
        implementation(*positional, **named)

    return step
