"""The figures of a plan, derived from plan, trace and deps alone: intervals, latency, memory, throughput.

Nothing here knows the cost model that solvers use (:mod:`tessera_core.plan.problem`); it states the same rules
a second time. Latency, and how fast the iterations of one batch follow each other, are those of one slot alone
under the workers' rule of dispatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera_core.deps.graph import Deps
from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.execute.simulator import BatchPlan, completions, simulate, steady_interval
from tessera_core.plan.ir import Plan, Route
from tessera_core.program.ir import IoBinding, Program, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One program of a route.

    ``resource_us``: what the busiest resource does at least in an iteration. ``latency_us``: one iteration alone, end
    to end, and until its successor can begin. ``serial_us``: everything in a row. ``interval_us``: no pipeline of the
    route's slots is faster.
    """

    route: int
    program: str
    resource_us: float
    latency_us: float
    serial_us: float
    interval_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes on a device."""

    device: str
    weight_bytes: int
    state_bytes: int
    activation_bytes: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weight_bytes + self.state_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a plan comes to, by route and program, and by device."""

    iterations: tuple[Iteration, ...]
    memory: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """``requests_per_s`` by route, all slots busy; tokens a second of all; time between a request's tokens."""

    requests_per_s: tuple[float, ...]
    tokens_per_s: float
    time_per_token_us: float


class RouteView:
    """One route's rows, indexed; the maps are built once and only read."""

    def __init__(self, plan: Plan, route: Route, trace: Trace) -> None:
        self.route = route
        self.programs = [trace.program(name) for name in route.programs]
        self.where: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for row in plan.assignments:
            if row.route == route.route:
                self.where[row.program, row.kernel][row.device] = row.time_us
        self.sent = [row for row in plan.transfers if row.route == route.route]
        self.homes: dict[str, set[str]] = defaultdict(set)
        for home in plan.homes:
            if home.route == route.route:
                self.homes[home.state].add(home.device)


def evaluate(plan: Plan, trace: Trace, deps: Deps) -> Evaluation:
    """Figures of a structurally sound plan (see :func:`structure_defects`)."""
    views = [RouteView(plan, route, trace) for route in plan.routes]
    return Evaluation(
        iterations=tuple(
            _iteration(plan, view, program, trace, model)
            for view, model in zip(views, plan_routes(plan, trace), strict=True)
            for program in view.programs
        ),
        memory=tuple(_held(plan, views, trace, deps)),
    )


def speed(routes: Sequence[Route], intervals_us: Mapping[tuple[int, str], float]) -> Speed:
    """Throughput of routes side by side; ``intervals_us`` by (route, program).

    A slot's batch of requests takes ``rate`` intervals of each program, and as all slots are in one phase at a
    time, batches leave at the rate-weighted sum. Requests follow the routes by speed.
    """
    requests: list[float] = []
    paces: list[float] = []
    for route in routes:
        steps = [intervals_us[route.route, name] for name in route.programs]
        requests.append(1e6 * route.batch / sum(r * step for r, step in zip(route.rates, steps, strict=True)))
        paces.append(steps[-1] * route.slots)
    total = sum(requests)
    return Speed(
        requests_per_s=tuple(requests),
        tokens_per_s=sum(r * tokens_per_request(route) for r, route in zip(requests, routes, strict=True)),
        time_per_token_us=sum(r / total * pace for r, pace in zip(requests, paces, strict=True)),
    )


def tokens_per_request(route: Route) -> int:
    """Tokens that a request of the route generates: one by its first program, then one per iteration."""
    return 1 if len(route.programs) == 1 else 1 + route.rates[-1]


def families_of(program: Program, trace: Trace) -> dict[int, list[str]]:
    """Buffer -> state families bound to it."""
    bound: dict[int, list[str]] = defaultdict(list)
    for binding in program.io:
        if binding.role == "state":
            bound[trace.tensors[binding.tensor].buffer].append(binding.name)
    return bound


def _iteration(plan: Plan, view: RouteView, program: Program, trace: Trace, model: RouteModel) -> Iteration:
    links = {(row["source"], row["destination"]): row for row in plan.facts["link"]}
    overhead = {row["device"]: float(row["overhead_us"]) for row in plan.facts["overhead"]}
    fed = {
        trace.tensors[binding.tensor].buffer
        for _, binding in feeding_outputs(view.programs, view.programs.index(program))
    }
    busy: dict[str, float] = defaultdict(float)
    wires: dict[tuple[str, str], float] = defaultdict(float)
    for item in program.kernels:
        for device, duration in view.where[program.name, item.id].items():
            busy[device] += duration
    for device in busy:
        busy[device] += overhead[device]
    serial = sum(busy.values())
    for row in (row for row in view.sent if row.program == program.name):
        link = links[row.source, row.destination]
        wire = row.bytes * 8 / (link["gbit_per_s"] * 1e3)
        busy[row.source] += link["send_us"] + (wire if link["occupies_sender"] else 0.0)
        if not link["occupies_sender"]:
            wires[row.source, row.destination] += wire
        # What feeds the next iteration is taken in there, perhaps together with other things.
        if row.buffer not in fed:
            busy[row.destination] += link["receive_us"]
        serial += link["send_us"] + wire + link["latency_us"] + link["receive_us"] + overhead[row.destination]
    resource = max([*busy.values(), *wires.values()])
    once = BatchPlan(
        batch=0,
        route=0,
        arrival_us=0.0,
        iterations=tuple(int(p.name == program.name) for p in model.programs),
    )
    alone = completions(simulate([replace(model, slots=1)], [once]))[0].end_us
    again = steady_interval(model, program.name, slots=1)
    return Iteration(
        route=view.route.route,
        program=program.name,
        resource_us=resource,
        latency_us=max(alone, again),
        serial_us=serial,
        interval_us=max(resource, again / view.route.slots),
    )


def feeding_outputs(programs: Sequence[Program], index: int) -> list[tuple[Program, IoBinding]]:
    """Outputs of a route's program that become inputs, each with the program that follows."""
    following = programs[min(index + 1, len(programs) - 1)]
    inputs = following.bindings("input")
    return [(following, b) for b in programs[index].bindings("output").values() if b.feeds in inputs]


def _held(plan: Plan, views: list[RouteView], trace: Trace, deps: Deps) -> list[Held]:
    weights: dict[str, set[int]] = defaultdict(set)
    state: dict[str, int] = defaultdict(int)
    active: dict[str, int] = defaultdict(int)
    for view in views:
        slots = view.route.slots
        for program in view.programs:
            users: set[str] = set()
            for item in program.kernels:
                users |= set(view.where[program.name, item.id])
            peak = _peak_bytes(program, trace, deps)
            for device in users:
                active[device] += slots * peak
            for access in deps.accesses(program.id):
                if trace.buffers[access.buffer].program is None:
                    for device in view.where[program.name, access.kernel]:
                        weights[device].add(access.buffer)
            for buffer, families in families_of(program, trace).items():
                for family in families:
                    for device in view.homes[family]:
                        state[device] += slots * trace.buffers[buffer].bytes
        for row in view.sent:
            active[row.destination] += slots * row.bytes
    return [
        Held(
            device=device.name,
            weight_bytes=sum(trace.buffers[b].bytes for b in weights[device.name]),
            state_bytes=state[device.name],
            activation_bytes=active[device.name],
        )
        for device in plan.devices
    ]


def _peak_bytes(program: Program, trace: Trace, deps: Deps) -> int:
    """Most bytes of inputs, activations and outputs live at once, in program order."""
    count = len(program.kernels)
    spans: dict[int, list[int]] = defaultdict(list)
    for access in deps.accesses(program.id):
        spans[access.buffer].append(access.kernel)
    for binding in program.io:
        if binding.role == "input":
            spans[trace.tensors[binding.tensor].buffer].append(0)
        elif binding.role == "output":
            buffer = trace.tensors[binding.tensor].buffer
            spans[buffer] += [count - 1] if spans.get(buffer) else [0, count - 1]
    live = np.zeros(count, dtype=np.int64)
    for buffer, kernels in spans.items():
        item = trace.buffers[buffer]
        if item.program is not None and item.kind != "state":
            live[min(kernels) : max(kernels) + 1] += item.bytes
    return int(live.max(initial=0))


def objective_us(plan: Plan, real: Evaluation) -> float:
    """Microseconds per batch of requests, as large as the largest route's, over all routes together.

    For latency: from the start of a batch to its end with nothing overlapped, on the fastest route.
    """
    if plan.facts["policy"] == "latency":
        serial = {(it.route, it.program): it.serial_us for it in real.iterations}
        return min(
            sum(r * serial[route.route, p] for r, p in zip(route.rates, route.programs, strict=True))
            for route in plan.routes
        )
    intervals = {(it.route, it.program): it.interval_us for it in real.iterations}
    largest = max(route.batch for route in plan.routes)
    return 1e6 * largest / sum(speed(plan.routes, intervals).requests_per_s)
