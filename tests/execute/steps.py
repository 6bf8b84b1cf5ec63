"""Small models whose step is a list of instructions, traced, and plans that place them at random."""

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tessera_core.deps.graph import Deps
from tessera_core.deps.stage import analyse_target
from tessera_core.plan import assemble
from tessera_core.plan.cluster import Cluster, Device, Link
from tessera_core.plan.ir import Plan, Route
from tessera_core.plan.needs import program_needs
from tessera_core.plan.placement import settled
from tessera_core.plan.problem import build_problem
from tessera_core.program.ir import State, Trace
from tessera_core.program.weights import initialise_module
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import BuiltModel
from tessera_core.trace.request import ProgramRequest
from tests.execute.helpers import make_plan

WIDTH = 8
KINDS = ("linear", "linear", "zeros", "halves", "copy", "fill", "half", "scale", "state")
"""What an instruction may do: make a tensor, fill one in two halves, overwrite or change one in place."""

Instruction = tuple[str, int, int]
"""Kind, and two tensors of the pool: of those made so far, by position modulo their number."""


class Steps:
    """Inputs x and z, state s, two weights; ``outputs``: positions in the pool, and behind it the weights.

    ``loop``: an output ``next`` feeds x. Nothing feeds z.
    """

    states = (State(name="s", batch_axis=0, sequence_axis=None, init={"kind": "full", "value": 0.25}),)

    def __init__(self, instructions: Sequence[Instruction], outputs: Sequence[int], loop: bool) -> None:
        self.instructions, self.outputs = instructions, outputs
        self.feeds: Mapping[str, str] = {"next": "x"} if loop else {}
        self.module = torch.nn.Module()
        for name in "ab":
            setattr(self.module, name, torch.nn.Linear(WIDTH, WIDTH, bias=False))
        self.recipes: dict[str, dict[str, Any]] = {
            f"{n}.weight": {"kind": "normal", "std": 0.3} for n in "ab"
        }
        initialise_module(self.module, self.recipes, 0)

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        return {"s": torch.full((request.batch, WIDTH), 0.25)}

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        return {name: torch.randn(request.batch, WIDTH) for name in ("x", "z")}

    def guards(self, request: ProgramRequest) -> tuple[()]:
        return ()

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        layers = (self.module.a, self.module.b)
        pool, half = [inputs["x"], inputs["z"]], WIDTH // 2
        for number, (kind, first, second) in enumerate(self.instructions):
            target, source = pool[first % len(pool)], pool[second % len(pool)]
            match kind:
                case "linear":
                    pool.append(layers[number % 2](source))
                case "zeros":
                    pool.append(torch.zeros(request.batch, WIDTH))
                case "halves":
                    made = torch.empty(request.batch, WIDTH)
                    made[:, half:].copy_(layers[0](source)[:, half:])
                    made[:, :half].copy_(layers[1](target)[:, :half])
                    pool.append(made)
                case "copy":
                    target.copy_(source)
                case "fill":
                    target.fill_(0.5)
                case "half":
                    target[:, :half].copy_(source[:, half:])
                case "scale":
                    target.mul_(0.5)
                case "state":
                    state["s"].add_(source)
                    pool.append(layers[1](state["s"]))
        # What x is fed is no output: where it is not read, no device would have it (see test_segments).
        shown = [*pool[1:2], *pool[1:]] if self.feeds else pool
        given = [*shown, *(layer.weight for layer in layers)]
        made = {f"y{i}": given[position % len(given)] for i, position in enumerate(self.outputs)}
        return {**made, **({"next": layers[0](pool[-1]).tanh()} if self.feeds else {})}


def traced(model: Steps) -> Trace:
    """The trace of a model; prefill and decode where it loops, else decode alone."""
    requests = [ProgramRequest("prefill", 1, 4)] if model.feeds else []
    requests.append(ProgramRequest("decode", 2, 4))
    built = BuiltModel(model, {"model": "steps", "source": "factory"}, "float32")
    return trace_model(built, requests, seed=0, fake_mode=None, versions={}).trace


def dependencies(trace: Trace) -> Deps:
    """The trace's dependencies by schema."""
    found = analyse_target(trace, None)
    return Deps(
        digest="sha256:0",
        program_digest="sha256:0",
        targets=("ops",),
        accesses_of={p.id: tuple(a for a in found.own if a.program == p.id) for p in trace.programs},
        edges_of={program: hazards.edges for program, hazards in found.hazards.items()},
        chains_of={program: hazards.chains for program, hazards in found.hazards.items()},
    )


def scattered(trace: Trace, deps: Deps, slots: int, devices: int, choices: random.Random) -> Plan:
    """A plan that runs every unit on some device or other."""
    names = "abc"[:devices]
    link = Link(latency_us=1.0, gbit_per_s=10.0, send_us=1.0, receive_us=1.0, occupies_sender=True)
    made = tuple(
        Device(name=n, type="cpu-1thread", capacity_bytes=1 << 40, memory_domain=n, price_per_hour=None)
        for n in names
    )
    rates = (2, 2) if len(trace.programs) > 1 else (2,)
    problem = build_problem(
        trace=trace,
        needs=[program_needs(trace, deps, program) for program in trace.programs],
        rates=rates,
        slots=slots,
        cluster=Cluster(
            devices=made,
            links={(a, b): link for a in names for b in names if a != b},
            domains=dict.fromkeys(names, 1 << 40),
            digest="",
        ),
        devices=made,
        times=_SameTimes(),  # type: ignore[arg-type]
        condition="alone",
    )
    placement = settled(problem, [choices.randrange(devices) for _ in problem.units])
    route = Route(
        route=0,
        share=1.0,
        batch=trace.programs[-1].batch,
        slots=slots,
        programs=tuple(program.name for program in trace.programs),
        rates=rates,
    )
    return make_plan(
        (
            route,
            assemble.assignments(problem, placement, 0, lambda *_: 1.0),
            assemble.transfers(problem, placement, 0),
            assemble.home_rows(problem, placement, 0),
        ),
        types=dict.fromkeys(names, "cpu-1thread"),
    )


class _SameTimes:
    def time(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(median_us=1.0)

    def overhead_us(self, _: str) -> float:
        return 0.5
