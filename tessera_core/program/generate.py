"""Greedy generation over whole programs, and the moves of state and outputs between them.

The unpartitioned reference that a partitioned run is verified against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tessera_core.program.guards import check_guards
from tessera_core.program.ir import Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.program.replay import ProgramRunner
from tessera_core.program.weights import guarded_prompts, initial_state, materialise_weights, random_inputs
from tessera_formats.errors import InputError


def shared_buffers(trace: Trace, program: Program) -> list[int]:
    """Weight and constant buffers that a program reads or gives out, ascending."""
    read = {trace.tensors[tensor].buffer for op in program.ops for tensor in op.inputs}
    read |= {trace.tensors[binding.tensor].buffer for binding in program.io}
    return sorted(buffer for buffer in read if trace.buffers[buffer].kind in ("weight", "constant"))


def move_state(
    trace: Trace,
    source_program: Program,
    source_memory: Memory,
    dest_program: Program,
    dest_memory: Memory,
    first_request: int,
    families: Sequence[str] | None = None,
) -> None:
    """Copy the requests of one program's state to rows ``first_request``... of another's.

    Along a family's batch axis the source's requests follow each other from ``first_request``; along its
    sequence axis the source's rows come first. State without a batch axis is copied whole. ``families``
    limits the move to some of them (default: all that both programs bind).
    """
    sources, destinations = source_program.bindings("state"), dest_program.bindings("state")
    for family in trace.states:
        if family.name not in sources or family.name not in destinations:
            continue
        if families is not None and family.name not in families:
            continue
        source = source_memory.view(sources[family.name].tensor)
        target = dest_memory.view(destinations[family.name].tensor)
        if family.batch_axis is not None:
            target = target.narrow(family.batch_axis, first_request, source.shape[family.batch_axis])
        if family.sequence_axis is not None:
            length = source.shape[family.sequence_axis]
            if length > target.shape[family.sequence_axis]:
                raise InputError(
                    f"{dest_program.name}: holds {target.shape[family.sequence_axis]} tokens of {family.name},"
                    f" {source_program.name} makes {length}; trace a larger decode context"
                )
            target = target.narrow(family.sequence_axis, 0, length)
        target.copy_(source)


def feed_outputs(
    source_program: Program,
    source_memory: Memory,
    dest_program: Program,
    dest_memory: Memory,
    first_request: int,
) -> None:
    """Copy every output that feeds an input of ``dest_program`` there, from row ``first_request`` on."""
    inputs = dest_program.bindings("input")
    for output in source_program.bindings("output").values():
        if output.feeds is None or output.feeds not in inputs:
            continue
        value = source_memory.view(output.tensor)
        target = dest_memory.view(inputs[output.feeds].tensor)
        target.narrow(0, first_request, value.shape[0]).copy_(value)


def new_memory(
    trace: Trace,
    program: Program,
    shared: Mapping[int, torch.UntypedStorage],
    inputs: Mapping[str, torch.Tensor],
) -> Memory:
    """A memory for one slot of ``program``: shared weights, fresh state, and inputs copied into storages."""
    memory = Memory(trace)
    needed = set(shared_buffers(trace, program))
    memory.bind_all({buffer: storage for buffer, storage in shared.items() if buffer in needed})
    memory.bind_all(initial_state(trace, program))
    for name, binding in program.bindings("input").items():
        reference = trace.tensors[binding.tensor]
        size = trace.buffers[reference.buffer].bytes
        memory.bind(reference.buffer, torch.zeros(size, dtype=torch.uint8).untyped_storage())
        if name in inputs:
            memory.view(binding.tensor).copy_(inputs[name])
    return memory


def generate(
    trace: Trace,
    prefill: Program,
    decode: Program,
    requests: Sequence[int],
    output_tokens: int,
    *,
    seed: int = 0,
    weights: Mapping[int, torch.UntypedStorage] | None = None,
    weights_file: Path | str | None = None,
    trusted: bool = False,
    output: str = "next_token",
) -> torch.Tensor:
    """Greedy tokens of ``requests`` by the unpartitioned programs, int64 (requests, output_tokens).

    The first token of a request comes from its prefill, each further one from a decode iteration. Requests
    run in batches of ``decode.batch``; a last batch that is short is filled up with its last request. Prompts,
    and what nothing feeds, come from :func:`random_inputs` with ``seed``. ``weights``: storages by buffer,
    else materialised here.
    """
    if not requests or output_tokens < 1:
        raise InputError("generation needs at least one request and one output token")
    if decode.batch % prefill.batch:
        raise InputError(
            f"{decode.name}: its batch is no multiple of {prefill.name}'s; trace programs whose batches divide"
        )
    check_guards(prefill, prompt_tokens=prefill.context)
    check_guards(decode, prompt_tokens=prefill.context, total_tokens=prefill.context + output_tokens)
    for batch in _batches(requests, decode.batch):
        for prompts in guarded_prompts(trace, prefill, seed, batch, ()):
            check_guards(prefill, inputs=prompts)
        for prompts in guarded_prompts(trace, decode, seed, batch, (prefill, decode)):
            check_guards(decode, inputs=prompts)
    if weights is None:
        needed = {*shared_buffers(trace, prefill), *shared_buffers(trace, decode)}
        weights = materialise_weights(trace, needed, weights_file, trusted)
    first, step = ProgramRunner(trace, prefill, trusted), ProgramRunner(trace, decode, trusted)
    token = decode.bindings("output")[output].tensor
    fed = {o.feeds for program in (prefill, decode) for o in program.bindings("output").values()}
    results: list[torch.Tensor] = []
    for batch in _batches(requests, decode.batch):
        prompt = random_inputs(trace, decode, seed, batch)
        slot = new_memory(trace, decode, weights, prompt)
        for row in range(0, decode.batch, prefill.batch):
            inputs = random_inputs(trace, prefill, seed, batch[row : row + prefill.batch])
            memory = new_memory(trace, prefill, weights, inputs)
            first(memory)
            move_state(trace, prefill, memory, decode, slot, row)
            feed_outputs(prefill, memory, decode, slot, row)
        feed = next(b.feeds for b in decode.bindings("output").values() if b.name == output)
        tokens = [slot.view(decode.bindings("input")[str(feed)].tensor).clone()]
        for _ in range(output_tokens - 1):
            step(slot)
            tokens.append(slot.view(token).clone())
            feed_outputs(decode, slot, decode, slot, 0)
            for name in prompt.keys() - fed:
                slot.view(decode.bindings("input")[name].tensor).copy_(prompt[name])
        results.append(torch.cat(tokens, dim=1))
    return torch.cat(results)[: len(requests)]


def _batches(requests: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(requests), size):
        batch = list(requests[start : start + size])
        yield batch + [batch[-1]] * (size - len(batch))
