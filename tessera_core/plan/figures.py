"""The figures of a plan, derived from plan, trace and deps alone: intervals, latency, memory, throughput.

Nothing here knows the cost model that solvers use (:mod:`tessera_core.plan.problem`); it states the same rules
a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera_core.deps.graph import Deps
from tessera_core.plan.ir import Plan, Route
from tessera_core.program.ir import Program, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One program of a route: busiest resource, end-to-end time alone, and the sum of everything in a row."""

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
            _iteration(plan, view, program, trace, deps) for view in views for program in view.programs
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


def _iteration(plan: Plan, view: RouteView, program: Program, trace: Trace, deps: Deps) -> Iteration:
    links = {(row["source"], row["destination"]): row for row in plan.facts["link"]}
    overhead = {row["device"]: float(row["overhead_us"]) for row in plan.facts["overhead"]}
    rows = [row for row in view.sent if row.program == program.name]
    busy: dict[str, float] = defaultdict(float)
    wires: dict[tuple[str, str], float] = defaultdict(float)
    serial = 0.0
    for item in program.kernels:
        for device, duration in view.where[program.name, item.id].items():
            busy[device] += duration
    for device in busy:
        busy[device] += overhead[device]
    for row in rows:
        link = links[row.source, row.destination]
        wire = row.bytes * 8 / (link["gbit_per_s"] * 1e3)
        busy[row.source] += link["send_us"] + (wire if link["occupies_sender"] else 0.0)
        busy[row.destination] += link["receive_us"] + overhead[row.destination]
        if not link["occupies_sender"]:
            wires[row.source, row.destination] += wire
            serial += wire
        serial += link["latency_us"]
    resource = max([*busy.values(), *wires.values()])
    latency = _makespan(view, program, rows, links, overhead, deps)
    return Iteration(
        route=view.route.route,
        program=program.name,
        resource_us=resource,
        latency_us=latency,
        serial_us=serial + sum(busy.values()),
        interval_us=max(resource, latency / view.route.slots),
    )


def _makespan(
    view: RouteView,
    program: Program,
    rows: list[Any],
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    overhead: Mapping[str, float],
    deps: Deps,
) -> float:
    """End of one iteration alone: devices run their kernels in program order, sends follow their producer at
    once, a received buffer is taken in before its first user; outputs that feed count until they arrive."""
    outgoing: dict[tuple[int, str], list[Any]] = defaultdict(list)
    arriving: dict[tuple[int, int, str], Any] = {}
    for row in rows:
        outgoing[row.producer, row.source].append(row)
        arriving[row.producer, row.buffer, row.destination] = row
    needs: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for edge in deps.edges(program.id):
        if edge.hazard == "RAW":
            needs[edge.destination].add((edge.source, edge.buffer))
    free: dict[str, float] = {}
    wire_free: dict[tuple[str, str], float] = defaultdict(float)
    arrival: dict[tuple[int, int, str], float] = {}
    pending: set[tuple[int, int, str]] = set()
    for item in program.kernels:
        for device, duration in view.where[program.name, item.id].items():
            clock = free.get(device, overhead[device])
            taken = [key for s, b in needs[item.id] if (key := (s, b, device)) in arrival]
            clock = max([clock, *(arrival[key] for key in taken)])
            for key in pending & set(taken):
                row = arriving[key]
                clock += links[row.source, device]["receive_us"] + overhead[device]
                pending.discard(key)
            clock += duration
            for row in outgoing[item.id, device]:
                link = links[device, row.destination]
                wire = row.bytes * 8 / (link["gbit_per_s"] * 1e3)
                clock += link["send_us"]
                if link["occupies_sender"]:
                    clock += wire
                    landed = clock
                else:
                    landed = max(clock, wire_free[device, row.destination]) + wire
                    wire_free[device, row.destination] = landed
                key = (row.producer, row.buffer, row.destination)
                arrival[key] = landed + link["latency_us"]
                pending.add(key)
            free[device] = clock
    ends = [*free.values()]
    for key in pending:
        row = arriving[key]
        landed = max(arrival[key], 0.0) + links[row.source, row.destination]["receive_us"]
        ends.append(landed + overhead[row.destination])
    return max(ends)


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

    For latency: from the start of a batch to its end with nothing overlapped, weighted by the routes' shares.
    """
    if plan.facts["policy"] == "latency":
        serial = {(it.route, it.program): it.serial_us for it in real.iterations}
        return sum(
            route.share
            * sum(r * serial[route.route, p] for r, p in zip(route.rates, route.programs, strict=True))
            for route in plan.routes
        )
    intervals = {(it.route, it.program): it.interval_us for it in real.iterations}
    largest = max(route.batch for route in plan.routes)
    return 1e6 * largest / sum(speed(plan.routes, intervals).requests_per_s)
