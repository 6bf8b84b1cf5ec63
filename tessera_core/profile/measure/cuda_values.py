"""Values of one iteration on a device: weights by their recipes, random inputs, state filled as far as it goes.

Large random weights are drawn on the device itself, so that a model traced without values has some to be timed on.
They follow the recipe's distribution, and differ from those that the executor makes of the same recipe.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera_core.program.generate import shared_buffers
from tessera_core.program.ir import Program, Trace, Weight
from tessera_core.program.memory import Memory, view_of
from tessera_core.program.weights import fill, materialise_weights, random_inputs

SEED = 20_261_201
PADDING_BYTES = 512
"""Behind every buffer: some kernels read whole vectors past the end of what they use."""
UNKNOWN_STD = 0.02
"""Of weights that come from the user's factory or file where the trace was made without values."""

_RECORDED = frozenset({"constant", "factory", "export"})


def shared_values(trace: Trace, device: str, trusted: bool) -> dict[int, torch.UntypedStorage]:
    """Weights and constants of all programs, by buffer.

    Raises the errors of :func:`~tessera_core.program.weights.materialise_weights`.
    """
    wanted = sorted({buffer for program in trace.programs for buffer in shared_buffers(trace, program)})
    found = {buffer: _storage(trace, buffer, device) for buffer in wanted}
    generator = torch.Generator(device).manual_seed(SEED)
    fake = bool(trace.info["fake"])
    named = {weight.buffer for weight in trace.weights}
    recorded = {buffer for buffer in wanted if buffer not in named}
    for weight in trace.weights:
        if weight.buffer in found and not _draw(trace, weight, found[weight.buffer], generator, fake):
            recorded.add(weight.buffer)
    for buffer, values in materialise_weights(trace, recorded, trusted=trusted).items():
        size = trace.buffers[buffer].bytes
        _bytes(found[buffer], size).copy_(_bytes(values, size))
    return found


def iteration_memory(
    trace: Trace, program: Program, shared: dict[int, torch.UntypedStorage], device: str
) -> Memory:
    """A memory with one program's weights, inputs and state; the state is as after many iterations.

    Floating-point state is normal. A decode step stands at its last position, a prefill at its first; integers
    of single requests are 0.
    """
    memory = Memory(trace, device=device)
    for buffer in shared_buffers(trace, program):
        memory.bind(buffer, shared[buffer])
    generator = torch.Generator(device).manual_seed(SEED)
    per_request = {state.name for state in trace.states if state.batch_axis is not None}
    for name, binding in program.bindings("state").items():
        reference = trace.tensors[binding.tensor]
        if not memory.is_bound(reference.buffer):
            memory.bind(reference.buffer, _storage(trace, reference.buffer, device))
        view = memory.view(binding.tensor)
        if view.dtype.is_floating_point:
            view.normal_(generator=generator)
        elif program.phase == "decode" and name not in per_request:
            view.fill_(program.context - 1)
    for name, values in drawn_inputs(trace, program, 0).items():
        tensor = program.bindings("input")[name].tensor
        reference = trace.tensors[tensor]
        if not memory.is_bound(reference.buffer):
            memory.bind(reference.buffer, _storage(trace, reference.buffer, device))
        memory.view(tensor).copy_(values)
    return memory


def drawn_inputs(trace: Trace, program: Program, number: int) -> dict[str, torch.Tensor]:
    """Inputs of batch ``number``, no two alike."""
    first = number * program.batch
    return random_inputs(trace, program, SEED, range(first, first + program.batch))


def counters(trace: Trace, program: Program, memory: Memory) -> Callable[[], None]:
    """What puts a program's integer state back to what it is now; an iteration moves it on."""
    views = [memory.view(binding.tensor) for binding in program.bindings("state").values()]
    saved = [(view, view.clone()) for view in views if not view.dtype.is_floating_point]

    def restore() -> None:
        for view, value in saved:
            view.copy_(value)

    return restore


def _draw(
    trace: Trace, weight: Weight, storage: torch.UntypedStorage, generator: torch.Generator, fake: bool
) -> bool:
    """Fill a weight by its recipe; False where its values are recorded elsewhere."""
    view, kind = view_of(storage, trace.tensors[weight.tensor]), weight.init["kind"]
    if kind in _RECORDED and not (fake and kind != "constant"):
        return False
    if kind == "normal" and "slice" not in weight.init:
        view.normal_(float(weight.init.get("mean", 0.0)), float(weight.init["std"]), generator=generator)
    elif kind in _RECORDED:
        if view.dtype.is_floating_point:
            view.normal_(0.0, UNKNOWN_STD, generator=generator)
    else:
        host = torch.empty(view.shape, dtype=view.dtype)
        fill(host, weight.name, weight.init, SEED)
        view.copy_(host)
    return True


def _storage(trace: Trace, buffer: int, device: str) -> torch.UntypedStorage:
    size = trace.buffers[buffer].bytes + PADDING_BYTES
    return torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()


def _bytes(storage: torch.UntypedStorage, count: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))
