"""The throughput and latency programs for HiGHS: a mixed-integer program whose only integers say where a
unit runs.

Columns, scaled so that times are near one: x[u,d] unit u runs on d; h[f,d] family f lives on d; z[t,s,d]
flow t is sent from s to d; m[a,d] resident a lies on d; q[e] an edge of the fed path crosses; T the interval of
the cycle (or the serial latency of a batch). Everything but x settles at the value that x implies, so it is
left continuous. The dual bound holds for every placement within this cost model: the path row states a
lower bound of the time that a batch's iterations take, never an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tessera_core.plan.problem import Problem, Resident

Goal = Literal["interval", "latency"]


@dataclass(slots=True)
class Rows:
    """Rows of a sparse matrix under construction."""

    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, entries: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """A row; repeated columns are summed, because the solver refuses them."""
        summed: dict[int, float] = {}
        for column, value in entries:
            summed[column] = summed.get(column, 0.0) + value
        self.columns.extend(summed.keys())
        self.values.extend(summed.values())
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)


@dataclass(slots=True)
class Model:
    """Columns and rows of the program for one problem."""

    problem: Problem
    scale: float
    rows: Rows = field(default_factory=Rows)
    upper: list[float] = field(default_factory=list)

    def column(self, upper: float = 1.0, count: int = 1) -> int:
        """First of ``count`` new columns with lower bound zero."""
        first = len(self.upper)
        self.upper.extend([upper] * count)
        return first


def build(problem: Problem, goal: Goal, scale: float) -> tuple[Model, int]:
    """The whole program; returns the column of T."""
    model = Model(problem, scale)
    rows, count = model.rows, len(problem.devices)
    devices = range(count)
    model.column(count=len(problem.units) * count)
    infinity = float("inf")
    for u, unit in enumerate(problem.units):
        rows.add(((u * count + d, 1.0) for d in devices), 1.0, infinity if unit.replicable else 1.0)
    lives = _family_rows(model)
    sent = _flow_rows(model)
    used = [_resident(model, resident) for resident in problem.activations]
    interval = model.column(upper=infinity)
    if goal == "interval":
        _resource_rows(model, interval, sent, used)
        _path_row(model, interval)
    else:
        _serial_row(model, interval, sent, used)
    _memory_rows(model, lives, sent, used)
    return model, interval


def _family_rows(model: Model) -> list[int]:
    """Homes: whoever touches a family runs where it lives, copying writers everywhere it lives."""
    problem, count = model.problem, len(model.problem.devices)
    lives = []
    for family in problem.families:
        if family.writers:
            first = family.writers[0] * count
        elif len(family.units) == 1:
            first = family.units[0] * count
        else:
            first = model.column(count=count)
        lives.append(first)
        for unit in family.units:
            if unit * count == first:
                continue
            upper = 0.0
            lower = 0.0 if unit in family.writers else -float("inf")
            for d in range(count):
                model.rows.add(((unit * count + d, 1.0), (first + d, -1.0)), lower, upper)
    return lives


def _flow_rows(model: Model) -> list[dict[tuple[int, int], int]]:
    """Column of every (source, destination) of each flow."""
    problem, count = model.problem, len(model.problem.devices)
    sent = []
    for flow in problem.flows:
        pairs = {(s, d): model.column() for s in range(count) for d in range(count) if s != d}
        sent.append(pairs)
        for d in range(count):
            into = [(pairs[s, d], -1.0) for s in range(count) if s != d]
            for unit in flow.consumers:
                entries = [(unit * count + d, 1.0), (flow.producer * count + d, -1.0), *into]
                model.rows.add(entries, -float("inf"), 0.0)
            if count > 2:
                for s in range(count):
                    if s != d:
                        entries = [(pairs[s, d], 1.0), (flow.producer * count + s, -1.0)]
                        model.rows.add(entries, -float("inf"), 0.0)
    return sent


def _resident(model: Model, resident: Resident) -> int:
    """First column of m[a, ...]; a single user's own columns serve."""
    count = len(model.problem.devices)
    if len(resident.users) == 1:
        return resident.users[0] * count
    first = model.column(count=count)
    for unit in resident.users:
        for d in range(count):
            model.rows.add(((unit * count + d, 1.0), (first + d, -1.0)), -float("inf"), 0.0)
    return first


def _resource_rows(
    model: Model, interval: int, sent: Sequence[dict[tuple[int, int], int]], used: Sequence[int]
) -> None:
    """T is at least what each device and each directed link does in a cycle."""
    problem, count, scale = model.problem, len(model.problem.devices), model.scale
    loads: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    wires: dict[tuple[int, int], list[tuple[int, float]]] = {pair: [] for pair in problem.links}
    for d in range(count):
        loads[d] += [
            (u * count + d, times[d] / scale) for u, times in enumerate(problem.cycle_times) if times[d]
        ]
        for first, rate in zip(used, problem.rates, strict=True):
            loads[d].append((first + d, rate * problem.overheads[d] / scale))
    for flow, pairs in zip(problem.flows, sent, strict=True):
        often = problem.shipped(flow) / scale
        for (s, d), column in pairs.items():
            loads[s].append((column, often * problem.send_us(flow.size, s, d)))
            loads[d].append((column, often * problem.receive_us(flow, s, d)))
            wires[s, d].append((column, often * problem.link_us(flow.size, s, d)))
    for entries in [*loads, *wires.values()]:
        model.rows.add([*entries, (interval, -1.0)], -float("inf"), 0.0)


def _serial_row(
    model: Model, interval: int, sent: Sequence[dict[tuple[int, int], int]], used: Sequence[int]
) -> None:
    """T is at least what a batch takes with nothing overlapped."""
    problem, count, scale = model.problem, len(model.problem.devices), model.scale
    entries = [
        (u * count + d, times[d] / scale) for u, times in enumerate(problem.cycle_times) for d in range(count)
    ]
    for first, rate in zip(used, problem.rates, strict=True):
        entries += [(first + d, rate * problem.overheads[d] / scale) for d in range(count)]
    for flow, pairs in zip(problem.flows, sent, strict=True):
        rate = problem.rates[flow.program]
        entries += [
            (column, rate * problem.cross_us(flow.size, s, d) / scale) for (s, d), column in pairs.items()
        ]
    model.rows.add([*entries, (interval, -1.0)], -float("inf"), 0.0)


def _path_row(model: Model, interval: int) -> None:
    """slots * T is at least the time of the fed paths, with what it costs to cross along them."""
    problem, count, scale = model.problem, len(model.problem.devices), model.scale
    entries: list[tuple[int, float]] = [(interval, -float(problem.slots))]
    along = zip(problem.rates, problem.paths, problem.path_steps, strict=True)
    for p, (rate, path, steps) in enumerate(along):
        entries += [
            (u * count + d, rate * problem.units[u].times[p][d] / scale) for u in path for d in range(count)
        ]
        for before, after, size in steps:
            least = min(problem.cross_us(size, s, d) for s, d in problem.links)
            crossing = model.column()
            entries.append((crossing, rate * least / scale))
            for d in range(count):
                row = ((after * count + d, 1.0), (before * count + d, -1.0), (crossing, -1.0))
                model.rows.add(row, -float("inf"), 0.0)
    model.rows.add(entries, -float("inf"), 0.0)


def _memory_rows(
    model: Model,
    lives: Sequence[int],
    sent: Sequence[dict[tuple[int, int], int]],
    used: Sequence[int],
) -> None:
    problem, count = model.problem, len(model.problem.devices)
    everything = sum(resident.size for resident in problem.weights) + problem.slots * (
        count * sum(resident.size for resident in problem.activations)
        + sum(family.size for family in problem.families)
        + sum(flow.size for flow in problem.flows)
    )
    if all(everything <= size for size, _ in problem.domains):
        return  # whatever is placed where, it fits
    weights = [(resident.size, _resident(model, resident)) for resident in problem.weights]
    for capacity, members in problem.domains:
        unit = 1.0 / max(capacity, 1)
        entries: list[tuple[int, float]] = []
        for d in members:
            entries += [(first + d, size * unit) for size, first in weights]
            entries += [
                (first + d, problem.slots * resident.size * unit)
                for resident, first in zip(problem.activations, used, strict=True)
            ]
            entries += [
                (first + d, problem.slots * family.size * unit)
                for family, first in zip(problem.families, lives, strict=True)
            ]
            entries += [
                (column, problem.slots * flow.size * unit)
                for flow, pairs in zip(problem.flows, sent, strict=True)
                for (_, destination), column in pairs.items()
                if destination == d
            ]
        model.rows.add(entries, -float("inf"), 1.0)
