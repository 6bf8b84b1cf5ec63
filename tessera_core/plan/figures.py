"""The figures of a plan, derived from plan, trace and deps alone: intervals, latency, memory, throughput.

Nothing here knows the cost model that solvers use (:mod:`tessera_core.plan.problem`); it states the same rules
a second time. Latency, and how fast the iterations of one batch follow each other, are those of one slot alone
under the workers' rule of dispatch.

A plan's throughput is that of its *cycles*: a batch of requests is so many iterations of each program, and as slots
are spread over the programs, every device and link does the work of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera_core.deps.graph import Deps
from tessera_core.execute.cycle import Pace, batch_us
from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.execute.simulator import BatchPlan, completions, simulate, steady_interval
from tessera_core.plan.ir import Plan, Route
from tessera_core.program.ir import IoBinding, Program, Trace

Resource = str | tuple[str, str]
"""A device by name, or the directed link between two."""


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
class Cycle:
    """A batch of requests on a route.

    ``resource_us``: what the busiest resource does at least for it. ``latency_us``: until its slot, alone, takes the
    next one. ``interval_us``: no pipeline of the route's slots is faster.
    """

    route: int
    resource_us: float
    latency_us: float
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
    """What a plan comes to, by route and program, by route, and by device."""

    iterations: tuple[Iteration, ...]
    cycles: tuple[Cycle, ...]
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
    iterations: list[Iteration] = []
    cycles: list[Cycle] = []
    for view, model in zip(views, plan_routes(plan, trace), strict=True):
        repeat_us = [steady_interval(model, program.name, slots=1) for program in view.programs]
        for program, again in zip(view.programs, repeat_us, strict=True):
            iterations.append(_iteration(plan, view, program, trace, model, again))
        cycles.append(_cycle(plan, view, trace, model, repeat_us))
    return Evaluation(
        iterations=tuple(iterations),
        cycles=tuple(cycles),
        memory=tuple(_held(plan, views, trace, deps)),
    )


def speed(routes: Sequence[Route], paces: Mapping[int, Pace]) -> Speed:
    """Throughput of routes side by side; ``paces`` by route. Requests follow the routes by speed."""
    requests = [1e6 * route.batch / paces[route.route].cycle_us for route in routes]
    total = sum(requests)
    return Speed(
        requests_per_s=tuple(requests),
        tokens_per_s=sum(r * tokens_per_request(route) for r, route in zip(requests, routes, strict=True)),
        time_per_token_us=sum(
            r / total * paces[route.route].token_us for r, route in zip(requests, routes, strict=True)
        ),
    )


def overlap(plan: Plan) -> dict[int, float]:
    """By route: a batch's cycle in simulation over what its iterations take where every slot is in one program.

    Less than one where programs keep different devices busy; 1 for a plan that states no cycles.
    """
    stated = {row["route"]: row["simulated_us"] for row in plan.facts["prediction"].get("cycles", ())}
    apart = phase_sums(
        plan.routes,
        {
            (row["route"], row["program"]): row["simulated_us"]
            for row in plan.facts["prediction"]["intervals"]
        },
    )
    return {
        route: stated[route] / total if total and route in stated else 1.0 for route, total in apart.items()
    }


def phase_sums(routes: Sequence[Route], intervals_us: Mapping[tuple[int, str], float]) -> dict[int, float]:
    """By route: rate-weighted sum of its programs' intervals; ``intervals_us`` by (route, program)."""
    return {
        route.route: sum(
            rate * intervals_us[route.route, name]
            for rate, name in zip(route.rates, route.programs, strict=True)
        )
        for route in routes
    }


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


def _iteration(
    plan: Plan, view: RouteView, program: Program, trace: Trace, model: RouteModel, again: float
) -> Iteration:
    """``again``: how fast one slot alone repeats the program."""
    links = {(row["source"], row["destination"]): row for row in plan.facts["link"]}
    overhead = {row["device"]: float(row["overhead_us"]) for row in plan.facts["overhead"]}
    work = _work(plan, view, program, trace)
    serial = sum(work.computing.values())
    for row in (row for row in view.sent if row.program == program.name):
        link = links[row.source, row.destination]
        wire = row.bytes * 8 / (link["gbit_per_s"] * 1e3)
        serial += link["send_us"] + wire + link["latency_us"] + link["receive_us"] + overhead[row.destination]
    resource = max([*work.once().values(), 0.0])
    once = BatchPlan(
        batch=0,
        route=0,
        arrival_us=0.0,
        iterations=tuple(int(p.name == program.name) for p in model.programs),
    )
    alone = completions(simulate([replace(model, slots=1)], [once]))[0].end_us
    return Iteration(
        route=view.route.route,
        program=program.name,
        resource_us=resource,
        latency_us=max(alone, again),
        serial_us=serial,
        interval_us=max(resource, again / view.route.slots),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """Least time of each resource (a device, or a pair of them for a link) in an iteration: its kernels with a
    segment's overhead, what it ships, and of that what is shipped only because it feeds the next iteration."""

    computing: Mapping[Resource, float]
    shipping: Mapping[Resource, float]
    feeding: Mapping[Resource, float]

    def once(self) -> dict[Resource, float]:
        """All of an iteration."""
        return self.times(1, 1)

    def times(self, iterations: int, feeding: int) -> dict[Resource, float]:
        """So many iterations, of which so many feed another."""
        sums: dict[Resource, float] = defaultdict(float)
        for part, count in (
            (self.computing, iterations),
            (self.shipping, iterations),
            (self.feeding, feeding - iterations),
        ):
            for resource, time in part.items():
                sums[resource] += count * time
        return sums


def _work(plan: Plan, view: RouteView, program: Program, trace: Trace) -> _Work:
    links = {(row["source"], row["destination"]): row for row in plan.facts["link"]}
    overhead = {row["device"]: float(row["overhead_us"]) for row in plan.facts["overhead"]}
    fed = {
        trace.tensors[binding.tensor].buffer
        for _, binding in feeding_outputs(view.programs, view.programs.index(program))
    }
    computing: dict[Resource, float] = {}
    shipping: dict[Resource, float] = defaultdict(float)
    feeding: dict[Resource, float] = defaultdict(float)
    for item in program.kernels:
        for device, duration in view.where[program.name, item.id].items():
            computing[device] = computing.get(device, overhead[device]) + duration
    for row in (row for row in view.sent if row.program == program.name):
        link = links[row.source, row.destination]
        wire = row.bytes * 8 / (link["gbit_per_s"] * 1e3)
        parts: list[tuple[Resource, float]] = [
            (row.source, link["send_us"] + (wire if link["occupies_sender"] else 0.0))
        ]
        if not link["occupies_sender"]:
            parts.append(((row.source, row.destination), wire))
        # What feeds the next iteration is taken in there, perhaps together with other things.
        if row.buffer not in fed:
            parts.append((row.destination, link["receive_us"]))
        for resource, time in parts:
            shipping[resource] += time
            if row.buffer in fed:
                feeding[resource] += time
    return _Work(computing, shipping, feeding)


def cycle_of(plan: Plan, route: Route, trace: Trace, model: RouteModel) -> Cycle:
    """The cycle of a route of the plan, at whatever rates ``route`` states."""
    repeat_us = [steady_interval(model, name, slots=1) for name in route.programs]
    return _cycle(plan, RouteView(plan, route, trace), trace, model, repeat_us)


def _cycle(plan: Plan, view: RouteView, trace: Trace, model: RouteModel, repeat_us: Sequence[float]) -> Cycle:
    """``repeat_us``: how fast one slot alone repeats each program.

    The last iteration of a batch feeds no other; a route's only program is repeated without end.
    """
    rates = view.route.rates
    last = max(index for index, rate in enumerate(rates) if rate)
    sums: dict[Resource, float] = defaultdict(float)
    for index, (program, rate) in enumerate(zip(view.programs, rates, strict=True)):
        feeding = rate - 1 if index == last and len(rates) > 1 else rate
        for resource, time in _work(plan, view, program, trace).times(rate, feeding).items():
            sums[resource] += time
    most = max([*sums.values(), 0.0])
    alone = batch_us(model, rates, repeat_us)
    return Cycle(
        route=view.route.route,
        resource_us=most,
        latency_us=alone,
        interval_us=max(most, alone / view.route.slots),
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
    intervals = {item.route: item.interval_us for item in real.cycles}
    largest = max(route.batch for route in plan.routes)
    return largest / sum(route.batch / intervals[route.route] for route in plan.routes)
