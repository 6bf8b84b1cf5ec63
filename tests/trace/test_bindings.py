"""Inputs, state and weights whose storages hold more than their names say, and guards on inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.ir import Guard
from tessera_core.program.replay import run_program
from tessera_core.program.weights import materialise_weights
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import BuiltModel
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import ModelError, UntracedLaunchError
from tests.trace.conftest import ToyModel

Tensors = dict[str, torch.Tensor]


class Model(ToyModel):
    """The toy with inputs, guards and weights of the test's choice."""

    def __init__(
        self, step: Any, inputs: Callable[[], Tensors], module: torch.nn.Module | None = None
    ) -> None:
        super().__init__(step)
        self.module = module or torch.nn.Module()
        self.recipes = {"w": {"kind": "arange"}} if module is not None else {}
        self._inputs = inputs
        self.own_guards: tuple[Guard, ...] = ()

    def make_inputs(self, request: ProgramRequest) -> Tensors:
        return self._inputs()

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        return self.own_guards


def traced(model: Model, phase: str = "decode") -> Any:
    built = BuiltModel(model, {"model": "toy", "source": "factory"}, "float32")
    return trace_model(built, [ProgramRequest(phase, 2, 8)], seed=0, fake_mode=None, versions={}).trace


def replayed(model: Model) -> torch.Tensor:
    """Output ``y`` of one replay, in memory that holds something else before."""
    trace = traced(model)
    (program,) = trace.programs
    rubbish = [torch.full((64,), 7.0) for _ in range(32)]
    del rubbish
    weights = materialise_weights(trace, shared_buffers(trace, program))
    memory = new_memory(trace, program, weights, model.make_inputs(ProgramRequest("decode", 2, 8)))
    run_program(trace, program, memory)
    return memory.view(program.bindings("output")["y"].tensor)


def tokens(value: Any = ((1,), (2,))) -> Callable[[], Tensors]:
    return lambda: {"tokens": torch.tensor(value)}


def _halves() -> Tensors:
    both = torch.ones(2, 8)
    return {"a": both[:, :4], "b": both[:, 4:]}


def _twice() -> Tensors:
    one = torch.ones(2, 8)
    return {"a": one, "b": one}


@pytest.mark.parametrize("inputs", [_halves, _twice])
def test_inputs_that_share_a_storage_are_refused(inputs: Callable[[], Tensors]) -> None:
    with pytest.raises(ModelError, match="input b shares memory with input a; copy it"):
        traced(Model(lambda net, i, s: {"y": i["a"] + i["b"]}, inputs))


def test_a_weight_as_an_input_is_refused() -> None:
    module = torch.nn.Linear(4, 4)
    model = Model(lambda net, i, s: {"y": i["a"] + 1}, lambda: {"a": module.weight.data})
    model.module = module
    with pytest.raises(ModelError, match="input a shares memory with weight weight; copy it"):
        traced(model)


def test_examples_may_be_kept_for_the_next_program() -> None:
    kept = tokens()()
    model = Model(lambda net, i, s: {"y": i["tokens"] + 1}, lambda: kept)
    built = BuiltModel(model, {"model": "toy", "source": "factory"}, "float32")
    requests = [ProgramRequest("decode", 2, context) for context in (8, 16)]
    trace = trace_model(built, requests, seed=0, fake_mode=None, versions={}).trace
    inputs = [program.bindings("input")["tokens"].tensor for program in trace.programs]
    assert len({trace.tensors[tensor].buffer for tensor in inputs}) == 2


def test_a_step_that_uses_more_than_its_input_is_refused() -> None:
    whole = torch.ones(2, 8)
    model = Model(lambda net, i, s: {"y": i["a"] + whole[:, 4:]}, lambda: {"a": whole[:, :4]})
    with pytest.raises(ModelError, match="uses more of the storage of input a than a itself"):
        traced(model)


def test_a_step_that_uses_more_than_its_state_is_refused() -> None:
    class Padded(Model):
        def make_state(self, request: ProgramRequest) -> Tensors:
            state = super().make_state(request)
            return state | {"cache": torch.zeros(2, 9, 16)[:, :8]}

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": inputs["tokens"] + state["cache"].as_strided((16,), (1,), 8 * 16)}

    with pytest.raises(ModelError, match="uses more of the storage of state cache"):
        traced(Padded(step, tokens()))


def _flat(module: torch.nn.Module) -> torch.Tensor:
    flat = torch.arange(16.0)
    module.w = torch.nn.Parameter(flat[:8])
    return flat


def test_the_unnamed_rest_of_a_weights_storage_is_kept() -> None:
    module = torch.nn.Module()
    flat = _flat(module)
    model = Model(lambda net, i, s: {"y": i["tokens"] * net.w + flat[8:]}, tokens(), module)
    assert torch.equal(replayed(model), torch.tensor([[1], [2]]) * flat[:8] + flat[8:])


def test_a_weight_and_a_constant_may_share_a_storage() -> None:
    module = torch.nn.Module()
    flat = _flat(module)
    module.register_buffer("c", flat[8:])
    model = Model(lambda net, i, s: {"y": i["tokens"] * net.w + net.c}, tokens(), module)
    assert torch.equal(replayed(model), torch.tensor([[1], [2]]) * flat[:8] + flat[8:])


def test_a_weight_beside_a_constant_cannot_be_read_on_the_host() -> None:
    module = torch.nn.Module()
    flat = _flat(module)
    module.register_buffer("c", flat[8:])
    model = Model(lambda net, i, s: {"y": i["tokens"] * int(net.w[3])}, tokens(), module)
    with pytest.raises(UntracedLaunchError, match="reads a value on the host"):
        traced(model)


def test_a_guard_counts_the_elements_of_the_input_as_it_came_in() -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        grid = inputs["grid"]
        return {"y": grid * int(grid.t()[0, 1])}

    transposed = torch.tensor([[1, 2], [3, 4]]).t()  # [[1, 3], [2, 4]]
    guards = traced(Model(step, lambda: {"grid": transposed})).programs[0].guards
    flat = transposed.flatten().tolist()
    assert [(g.index, g.value) for g in guards] == [(2, 2)]
    assert all(flat[g.index] == g.value for g in guards)


def _in_another_dtype(grid: torch.Tensor) -> int:
    return int(grid.view(torch.int32)[0, 0])


def _negated(grid: torch.Tensor) -> int:
    return int(torch._neg_view(grid)[0, 0])


def _after_a_write(grid: torch.Tensor) -> int:
    grid.add_(1)
    return int(grid[0, 0])


@pytest.mark.parametrize("read", [_in_another_dtype, _negated, _after_a_write])
def test_what_is_no_element_of_an_input_cannot_be_guarded(read: Callable[[torch.Tensor], int]) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": inputs["grid"] * read(inputs["grid"])}

    with pytest.raises(UntracedLaunchError, match="cannot be checked before a request starts"):
        traced(Model(step, lambda: {"grid": torch.tensor([[1, 2], [3, 4]])}))


def _read_and_fed(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"next_token": inputs["tokens"] + int(inputs["tokens"][0, 0])}


def test_an_input_that_iterations_feed_is_not_read_on_the_host() -> None:
    line = _read_and_fed.__code__.co_firstlineno + 1
    with pytest.raises(UntracedLaunchError, match=rf"test_bindings.py:{line}: reads input tokens"):
        traced(Model(_read_and_fed, tokens()))
    # A prefill runs once, on what the request brings.
    assert traced(Model(_read_and_fed, tokens()), "prefill").programs[0].guards


@pytest.mark.parametrize(
    ("subject", "index", "output", "reason"),
    [
        ("input:nothing", None, "y", "is not there"),
        ("input:tokens", 2, "y", "is not there"),
        ("input:tokens", 0, "next_token", "later iterations get from an output"),
    ],
)
def test_a_models_own_guard_must_be_checkable(
    subject: str, index: int | None, output: str, reason: str
) -> None:
    model = Model(lambda net, i, s: {output: i["tokens"] + 1}, tokens())
    model.own_guards = (Guard(subject=subject, index=index, comparison="ge", value=0, reason="because"),)
    with pytest.raises(ModelError, match=reason):
        traced(model)
