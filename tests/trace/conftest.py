"""A small model that the tracer's tests share, and ways to trace a step that a test writes down itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tessera_core.program.ir import Guard, Program, State, Trace
from tessera_core.trace.build import Traced, trace_model
from tessera_core.trace.factory import BuiltModel
from tessera_core.trace.fake import building, new_fake_mode
from tessera_core.trace.request import ProgramRequest

Step = Callable[[torch.nn.Module, dict[str, torch.Tensor], dict[str, torch.Tensor]], dict[str, torch.Tensor]]
WIDTH = 16


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.second = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        result: torch.Tensor = x + self.second(torch.nn.functional.silu(self.first(y)))
        return result


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("scale", torch.arange(WIDTH, dtype=torch.float32), persistent=False)


class ToyModel:
    """State: ``cache`` (batch, context, WIDTH) and ``position`` (one integer); the step is the test's.

    Its ``next_token``, where it returns one, feeds ``tokens``.
    """

    feeds: Mapping[str, str]
    recipes: Mapping[str, dict[str, Any]] | None = None
    states: tuple[State, ...] = (
        State(name="cache", batch_axis=0, sequence_axis=1, init={"kind": "zeros"}),
        State(name="position", batch_axis=None, sequence_axis=None, init={"kind": "zeros"}),
    )

    def __init__(self, step: Step) -> None:
        self.module: torch.nn.Module = Net()
        self.feeds = {}
        self._step = step

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        return {
            "cache": torch.zeros(request.batch, request.context, WIDTH),
            "position": torch.zeros(1, dtype=torch.int64),
        }

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        return {"tokens": torch.arange(request.batch).reshape(request.batch, 1)}

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        outputs = self._step(self.module, inputs, state)
        if isinstance(outputs, dict) and "next_token" in outputs:
            self.feeds = {"next_token": "tokens"}
        return outputs

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        return ()


def decode(
    net: torch.nn.Module, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Three blocks around one cached mean; appends a row to the cache and counts."""
    assert isinstance(net, Net)
    x = net.embed(inputs["tokens"]) * net.scale
    state["cache"].index_copy_(1, state["position"], x)
    x = x + state["cache"].mean(1, keepdim=True)
    for layer in net.layers:
        x = layer(x)
    state["position"].add_(1)
    return {"next_token": (x[:, -1] @ net.embed.weight.t()).argmax(-1, keepdim=True)}


def run_tracer(step: Step, fake: bool = False, batches: tuple[int, ...] = (2,)) -> Traced:
    torch.manual_seed(0)
    mode = new_fake_mode() if fake else None
    with building(mode):
        model = ToyModel(step)
    built = BuiltModel(model, {"model": "toy", "source": "factory"}, "float32")
    requests = [ProgramRequest("decode", batch, 8) for batch in batches]
    return trace_model(built, requests, seed=0, fake_mode=mode, versions={})


@pytest.fixture
def tracer() -> Callable[..., Traced]:
    """``tracer(step, fake=False, batches=(2,))`` traces the toy model with that step."""
    return run_tracer


@pytest.fixture
def toy_step() -> Step:
    """The toy model's own step."""
    return decode


@pytest.fixture
def traced_program(tracer: Callable[..., Traced]) -> Callable[..., tuple[Trace, Program]]:
    """Traces a step and gives the trace and its only program."""

    def trace(step: Step, fake: bool = False) -> tuple[Trace, Program]:
        made = tracer(step, fake).trace
        return made, made.programs[0]

    return trace
