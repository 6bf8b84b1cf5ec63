"""Replay of traced models against the models themselves, bit for bit, final state included."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessera_core.program.generate import generate, move_state, new_memory, shared_buffers
from tessera_core.program.memory import Memory
from tessera_core.program.replay import ProgramRunner, kernel_runners
from tessera_core.program.weights import materialise_weights, random_inputs
from tessera_core.trace.request import parse_program
from tessera_formats.errors import GuardError, InputError

pytestmark = pytest.mark.usefixtures("eager_launches")


def weights_of(traced: Any) -> dict[int, torch.UntypedStorage]:
    needed = {b for program in traced.trace.programs for b in shared_buffers(traced.trace, program)}
    return materialise_weights(traced.trace, needed)


def check_equal(memory: Memory, program: Any, outputs: dict[str, torch.Tensor], state: Any) -> None:
    expected = {("output", name): value for name, value in outputs.items()}
    expected |= {("state", name): value for name, value in state.items()}
    found = {(b.role, b.name): memory.view(b.tensor) for b in program.io if b.role != "input"}
    assert set(found) == set(expected)
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@torch.no_grad()
def test_prefill_and_decode_are_exact(traced: Any) -> None:
    trace, model, weights = traced.trace, traced.model, weights_of(traced)
    for program, steps in ((traced.prefill, 1), (traced.decode, 3)):
        request = parse_program(program.name)
        inputs = random_inputs(trace, program, 0, range(program.batch))
        state = model.make_state(request)
        memory, runner = new_memory(trace, program, weights, inputs), ProgramRunner(trace, program)
        for _ in range(steps):
            outputs = model.step(request, inputs, state)
            runner(memory)
            check_equal(memory, program, outputs, state)
            if program is traced.decode:
                inputs = {"tokens": outputs["next_token"]}
                memory.view(program.bindings("input")["tokens"].tensor).copy_(outputs["next_token"])


def rows_of(traced: Any, family: str, target: torch.Tensor, row: int, source: torch.Tensor) -> torch.Tensor:
    """Where in a decode's state the state of its request ``row`` belongs."""
    (found,) = (state for state in traced.trace.states if state.name == family)
    if found.batch_axis is not None:
        target = target.narrow(found.batch_axis, row, 1)
    if found.sequence_axis is not None:
        target = target.narrow(found.sequence_axis, 0, source.shape[found.sequence_axis])
    return target


@torch.no_grad()
def eager_tokens(traced: Any, requests: list[int], output_tokens: int, seed: int) -> torch.Tensor:
    """Greedy generation by the model itself: prompts one by one, then decode steps as one batch."""
    model, prefill = traced.model, parse_program(traced.prefill.name)
    decode = parse_program(traced.decode.name)
    state, first = model.make_state(decode), []
    for row, request in enumerate(requests):
        own = model.make_state(prefill)
        outputs = model.step(prefill, random_inputs(traced.trace, traced.prefill, seed, [request]), own)
        first.append(outputs["next_token"])
        for name, value in own.items():
            rows_of(traced, name, state[name], row, value).copy_(value)
    tokens = [torch.cat(first)]
    for _ in range(output_tokens - 1):
        tokens.append(model.step(decode, {"tokens": tokens[-1]}, state)["next_token"].clone())
    return torch.cat(tokens, dim=1)


def test_generation_equals_the_eager_greedy_loop(traced: Any) -> None:
    requests = [5, 9, 2, 7]
    expected = eager_tokens(traced, requests, 6, seed=11)
    found = generate(traced.trace, traced.prefill, traced.decode, requests, 6, seed=11)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    assert len(set(expected[:, 0].tolist())) > 1, "the prompts make no difference"


def test_a_request_generates_the_same_in_any_company(traced: Any) -> None:
    weights = weights_of(traced)
    run = (traced.trace, traced.prefill, traced.decode)
    together = generate(*run, [5, 9, 2, 7, 1], 3, weights=weights)
    alone = generate(*run, [2], 3, weights=weights)
    assert together.shape == (5, 3)
    assert torch.equal(alone[0], together[2])


@torch.no_grad()
def test_a_prefill_lands_in_its_rows_of_the_decode_state(traced: Any) -> None:
    trace, weights = traced.trace, weights_of(traced)
    memory = new_memory(trace, traced.prefill, weights, random_inputs(trace, traced.prefill, 0, [4]))
    ProgramRunner(trace, traced.prefill)(memory)
    slot = new_memory(trace, traced.decode, weights, {})
    move_state(trace, traced.prefill, memory, traced.decode, slot, 2)
    sources, targets = traced.prefill.bindings("state"), traced.decode.bindings("state")
    for name, binding in sources.items():
        source, target = memory.view(binding.tensor), slot.view(targets[name].tensor)
        expected = torch.zeros_like(target)
        rows_of(traced, name, expected, 2, source).copy_(source)
        assert bool(source.any()), name
        assert torch.equal(target, expected), name


def test_slots_do_not_disturb_each_other(traced: Any) -> None:
    """Two slots, stepped kernel by kernel in turn, give what each gives alone."""
    trace, program, weights = traced.trace, traced.decode, weights_of(traced)
    runners = kernel_runners(trace, program, range(len(program.kernels)))
    batches = [random_inputs(trace, program, seed, range(4)) for seed in (1, 2)]
    slots = [new_memory(trace, program, weights, inputs) for inputs in batches]
    for runner in runners.values():
        for slot in slots:
            runner(slot)
    for slot, inputs in zip(slots, batches):
        alone = new_memory(trace, program, weights, inputs)
        ProgramRunner(trace, program)(alone)
        for binding in program.io:
            assert torch.equal(slot.view(binding.tensor), alone.view(binding.tensor)), binding.name


def test_fixed_outputs_and_activations_change_nothing(traced: Any) -> None:
    trace, program, weights = traced.trace, traced.decode, weights_of(traced)
    inputs = random_inputs(trace, program, 1, range(4))
    free, fixed = (new_memory(trace, program, weights, inputs) for _ in range(2))
    own = [b.id for b in trace.buffers if b.program == program.id and b.kind in ("activation", "output")]
    fixed.fixed = frozenset(own)
    storages = {b: torch.zeros(trace.buffers[b].bytes, dtype=torch.uint8).untyped_storage() for b in own}
    fixed.bind_all(storages)
    runner = ProgramRunner(trace, program)
    runner(free)
    runner(fixed)
    for name, binding in program.bindings("output").items():
        buffer = trace.tensors[binding.tensor].buffer
        assert torch.equal(free.view(binding.tensor), fixed.view(binding.tensor)), name
        assert fixed.storage(buffer).data_ptr() == storages[buffer].data_ptr(), name


def test_generation_refuses_what_the_trace_is_not_valid_for(traced: Any, one_line: Any) -> None:
    run = (traced.trace, traced.prefill, traced.decode)
    if any(name.endswith(".ssm_state") for name in traced.decode.bindings("state")):
        assert not traced.decode.guards, "a recurrent state never fills up"
    else:
        with pytest.raises(GuardError) as caught:
            generate(*run, [1], 50)
        assert "total_tokens is 66, must be <= 65" in one_line(caught)
    with pytest.raises(InputError):
        generate(*run, [], 4)
    with pytest.raises(InputError):
        generate(traced.trace, replace(traced.prefill, batch=3), traced.decode, [1], 4)
