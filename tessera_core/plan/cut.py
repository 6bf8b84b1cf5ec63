"""Placements on two devices as cuts of a graph: whatever the cost model charges is the sum of the arcs that a cut
severs, so the placement of least cost, for any weighing of the resources, is a minimum cut.

Sources: Stone, "Multiprocessor scheduling with the aid of network flow algorithms", IEEE TSE 3(1), 1977, for the
graph; Kolmogorov and Zabih, "What energy functions can be minimized via graph cuts?", PAMI 26(2), 2004, for which
costs fit. A node on the source's side is labelled 0 and stands for device 0, on the sink's side 1 for device 1. A
unit that may run on both (a copying state writer) has two nodes: it runs on device 0 where the first is labelled
0, and on device 1 where the second is labelled 1. "Any of these units runs on device d" is a node tied to theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tessera_core.plan.loads import incidence
from tessera_core.plan.placement import Placement, trimmed
from tessera_core.plan.problem import Problem, Resident

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int8]

SOURCE, SINK = 0, 1
"""Nodes that are always labelled 0 and 1."""
LARGEST_CAPACITY = 1 << 29
"""Flows are 32-bit integers: what all arcs from the source carry together at most, and what one without end does."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Columns of the cost model: over a cycle the load of each device, of each directed link, and the fed paths
    over the slots; then memory per domain; then the serial latency."""

    domains: int

    bounding: ClassVar[slice] = slice(0, 5)
    """Those that bound the interval of the cycle from below."""
    path: ClassVar[int] = 4
    """Of the fed paths, over the slots."""

    def load(self, device: int) -> int:
        """Of a device, in microseconds."""
        return device

    def link(self, source: int) -> int:
        """Of the link that leaves ``source``."""
        return 2 + source

    def memory(self, domain: int) -> int:
        """Of a memory domain, in bytes."""
        return 5 + domain

    @property
    def serial(self) -> int:
        """Serial latency."""
        return 5 + self.domains

    @property
    def count(self) -> int:
        """How many there are."""
        return 6 + self.domains


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """The graph of a problem of two devices.

    ``on[d][u]``: the node that says whether unit u runs on device d. An arc is severed where its tail is labelled
    0 and its head 1; ``costs`` (sparse, arcs by resources) says what that costs, ``tied_*`` are arcs that cannot be
    severed. ``members[d]`` (sparse, nodes of ``any_nodes[d]`` by all nodes): who has to run on device d for the
    node to say so; ``life_nodes`` and ``life_members``: likewise for state writers, and who needs their state; a
    state that nobody else needs lives where the unit ``life_leaders`` says.
    """

    problem: Problem
    resources: Resources
    nodes: int
    on: tuple[Integers, Integers]
    tails: Integers
    heads: Integers
    costs: Any
    tied_tails: Integers
    tied_heads: Integers
    any_nodes: tuple[Integers, Integers]
    members: tuple[Any, Any]
    life_nodes: tuple[Integers, Integers]
    life_members: tuple[Any, Any]
    life_leaders: Integers

    def least(self, weights: Floats) -> tuple[list[Placement], float]:
        """Placements of the least weighted cost (the two extreme ones), and a value that none undercuts.

        ``weights``: one per resource, not negative. Capacities are rounded down, so the value is a true bound.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        capacity = self.costs @ weights
        scale = LARGEST_CAPACITY / max(float(capacity[self.tails == SOURCE].sum()), 1e-30)
        whole = np.floor(np.minimum(capacity * scale, LARGEST_CAPACITY)).astype(np.int32)
        endless = np.full(len(self.tied_tails), LARGEST_CAPACITY, dtype=np.int32)
        tails = np.concatenate([self.tails, self.tied_tails])
        heads = np.concatenate([self.heads, self.tied_heads])
        graph = csr_array(
            (np.concatenate([whole, endless]), (tails, heads)), shape=(self.nodes, self.nodes), dtype=np.int32
        )
        graph.sum_duplicates()
        result = maximum_flow(graph, SOURCE, SINK)
        left = csr_array(graph - result.flow)
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        found = []
        for start, reachable, label in ((SOURCE, left, 0), (SINK, csr_array(left.T), 1)):
            labels = np.full(self.nodes, 1 - label, dtype=np.int8)
            labels[breadth_first_order(reachable, start, return_predecessors=False)] = label
            found.append(self.placement(labels))
        return list(dict.fromkeys(found)), result.flow_value / scale

    def placement(self, labels: Labels) -> Placement:
        """The placement that labels say, with state writers on no more devices than they must."""
        first, second = labels[self.on[0]] == 0, labels[self.on[1]] == 1
        pairs = zip(first.tolist(), second.tolist(), strict=True)
        return trimmed(
            self.problem, tuple(((0,) if a else ()) + ((1,) if b else ()) or (0,) for a, b in pairs)
        )

    def loads(self, placements: Sequence[Placement]) -> Floats:
        """What each placement costs of each resource, shape (placements, resources)."""
        where = np.array(
            [[[d in unit for unit in placement] for placement in placements] for d in (0, 1)], dtype=bool
        )
        labels = self._labels(len(placements))
        labels[self.on[0]] = ~where[0].T
        labels[self.on[1]] = where[1].T  # of a unit on one device both nodes are one, with the same label
        return self._loads(labels)

    def loads_of(self, devices: Integers) -> Floats:
        """The same from one device per unit, shape (placements, units); state writers run where others need them."""
        labels = self._labels(len(devices))
        labels[self.on[0]] = labels[self.on[1]] = devices.T
        first, second = self.life_nodes
        alone = devices[:, self.life_leaders].T
        labels[first], labels[second] = 1, 0
        for _ in range(2):  # a state writer may itself read the state that another one writes
            homes = [self._any(labels, members, d) for d, members in enumerate(self.life_members)]
            nowhere = (homes[0] == 1) & (homes[1] == 0)
            labels[first] = np.where(nowhere, alone, homes[0])
            labels[second] = np.where(nowhere, alone, homes[1])
        return self._loads(labels)

    def _labels(self, placements: int) -> Labels:
        labels = np.zeros((self.nodes, placements), dtype=np.int8)
        labels[SINK] = 1
        return labels

    def _loads(self, labels: Labels) -> Floats:
        for d, (nodes, members) in enumerate(zip(self.any_nodes, self.members, strict=True)):
            labels[nodes] = self._any(labels, members, d)
        severed = (labels[self.tails] == 0) & (labels[self.heads] == 1)
        return np.asarray((self.costs.T @ severed.astype(float)).T)

    def _any(self, labels: Labels, members: Any, device: int) -> Labels:
        met = members @ (labels == device).astype(np.int32) > 0
        return np.where(met, device, 1 - device).astype(np.int8)


@dataclass(slots=True)
class _Builder:
    """A graph under construction."""

    problem: Problem
    resources: Resources
    copies: tuple[int, int]
    links: int
    on: tuple[list[int], list[int]]
    nodes: int
    arcs: list[tuple[int, int]] = field(default_factory=list)
    costs: list[tuple[int, int, float]] = field(default_factory=list)
    tied: list[tuple[int, int]] = field(default_factory=list)
    any_of: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    lives: tuple[dict[int, set[int]], dict[int, set[int]]] = field(default_factory=lambda: ({}, {}))
    leaders: dict[int, int] = field(default_factory=dict)

    def charge(self, tail: int, head: int, costs: Iterable[tuple[int, float]]) -> None:
        """What it costs to label ``tail`` 0 and ``head`` 1."""
        kept = [(resource, value) for resource, value in costs if value > 0]
        if kept and tail != head:
            self.costs += [(len(self.arcs), resource, value) for resource, value in kept]
            self.arcs.append((tail, head))

    def forbid(self, tail: int, head: int) -> None:
        """No placement labels ``tail`` 0 and ``head`` 1."""
        if tail != head:
            self.tied.append((tail, head))

    def runs(self, node: int, device: int, costs: Iterable[tuple[int, float]]) -> None:
        """What it costs that ``node`` says yes for ``device``."""
        self.charge(*((node, SINK) if device == 0 else (SOURCE, node)), costs)

    def any(self, units: Iterable[int], device: int) -> int:
        """The node that says whether any of ``units`` runs on ``device``."""
        nodes = tuple(sorted({self.on[device][unit] for unit in units}))
        if len(nodes) == 1:
            return nodes[0]
        key = (device, nodes)
        if key not in self.any_of:
            self.any_of[key] = self.nodes
            for node in nodes:
                self.forbid(*((node, self.nodes) if device == 0 else (self.nodes, node)))
            self.nodes += 1
        return self.any_of[key]


def cut_model(problem: Problem, copies: tuple[int, int] = (1, 1), links: int = 0) -> CutModel:
    """The graph of ``problem``, which has two devices, or two types with so many devices each.

    What a type does is then shared out evenly over its devices, and what is shipped over ``links`` links each way
    (0: one for every pair): with all of them, less than any device or link of a real placement does at most.
    """
    assert len(problem.devices) == 2, "cuts are between two devices"
    resources = Resources(len(problem.domains))
    builder = _Builder(problem, resources, copies, links or copies[0] * copies[1], *_unit_nodes(problem))
    _compute(builder)
    _families(builder)
    _transfers(builder)
    _paths(builder)
    _residents(builder)
    return _finished(builder)


def _unit_nodes(problem: Problem) -> tuple[tuple[list[int], list[int]], int]:
    """A node for each unit; two for each set of state writers that share their homes."""
    parent = list(range(len(problem.units)))

    def root(unit: int) -> int:
        while parent[unit] != unit:
            unit = parent[unit]
        return unit

    for family in problem.families:
        for writer in family.writers[1:]:
            parent[root(writer)] = root(family.writers[0])
    nodes = 2
    on: tuple[list[int], list[int]] = ([], [])
    pairs: dict[int, tuple[int, int]] = {}
    for unit, what in enumerate(problem.units):
        key = root(unit)
        if key not in pairs:
            pairs[key] = (nodes, nodes + 1) if what.replicable else (nodes, nodes)
            nodes = pairs[key][1] + 1
        for d in (0, 1):
            on[d].append(pairs[key][d])
    return on, nodes


def _compute(builder: _Builder) -> None:
    resources = builder.resources
    problem = builder.problem
    for index, (unit, times) in enumerate(zip(problem.units, problem.cycle_times, strict=True)):
        for d in (0, 1):
            costs = [(resources.load(d), times[d] / builder.copies[d]), (resources.serial, times[d])]
            builder.runs(builder.on[d][index], d, costs)
        if unit.replicable:  # it runs somewhere
            builder.forbid(builder.on[1][index], builder.on[0][index])


def _families(builder: _Builder) -> None:
    """Who touches a family runs where it lives, and it lives where its writers run."""
    for family in builder.problem.families:
        if not family.writers:
            continue
        first, second = (builder.on[d][family.writers[0]] for d in (0, 1))
        builder.leaders.setdefault(first, family.writers[0])
        builder.lives[0].setdefault(first, set())
        builder.lives[1].setdefault(second, set())
        for unit in family.units:
            builder.forbid(builder.on[0][unit], first)
            builder.forbid(second, builder.on[1][unit])
            if unit not in family.writers:
                builder.lives[0][first].add(builder.on[0][unit])
                builder.lives[1][second].add(builder.on[1][unit])


def _transfers(builder: _Builder) -> None:
    problem, resources = builder.problem, builder.resources
    for flow in problem.flows:
        size, often, rate = flow.size, problem.shipped(flow), problem.rates[flow.program]
        for s, d in ((0, 1), (1, 0)):
            needed, held = builder.any(flow.consumers, d), builder.on[d][flow.producer]
            costs = [
                (resources.load(s), often * problem.send_us(size, s, d) / builder.copies[s]),
                (resources.load(d), often * problem.receive_us(flow, s, d) / builder.copies[d]),
                (resources.link(s), often * problem.link_us(size, s, d) / builder.links),
                (resources.serial, rate * problem.cross_us(size, s, d)),
                *_memory(builder, d, problem.slots * size),
            ]
            builder.charge(*((held, needed) if d == 1 else (needed, held)), costs)


def _paths(builder: _Builder) -> None:
    """The fed paths' kernels, and the cheapest way to cross along them."""
    problem, column = builder.problem, builder.resources.path
    along = zip(problem.rates, problem.paths, problem.path_steps, strict=True)
    for p, (rate, path, steps) in enumerate(along):
        for unit in path:
            for d in (0, 1):
                time = rate * problem.units[unit].times[p][d] / problem.slots
                builder.runs(builder.on[d][unit], d, [(column, time)])
        for before, after, size in steps:
            least = min(problem.cross_us(size, s, d) for s, d in problem.links)
            ends = builder.on[0][before], builder.on[0][after]
            for tail, head in (ends, ends[::-1]):
                builder.charge(tail, head, [(column, rate * least / problem.slots)])


def _residents(builder: _Builder) -> None:
    """Weights, state and activations in memory, and what a program costs a device that it uses at all."""
    problem, resources = builder.problem, builder.resources
    lasting = [
        *problem.weights,
        *(Resident(size=f.size * problem.slots, users=f.writers[:1] or f.units) for f in problem.families),
    ]
    for d in (0, 1):
        for resident in lasting:
            builder.runs(builder.any(resident.users, d), d, _memory(builder, d, resident.size))
        for rate, activations in zip(problem.rates, problem.activations, strict=True):
            overhead = rate * problem.overheads[d]
            costs = [(resources.load(d), overhead / builder.copies[d]), (resources.serial, overhead)]
            memory = _memory(builder, d, activations.size * problem.slots)
            builder.runs(builder.any(activations.users, d), d, [*costs, *memory])


def _memory(builder: _Builder, device: int, size: int) -> list[tuple[int, float]]:
    return [
        (builder.resources.memory(index), float(size))
        for index, (_, members) in enumerate(builder.problem.domains)
        if device in members
    ]


def _finished(builder: _Builder) -> CutModel:
    from scipy.sparse import csr_array

    arcs = np.array(builder.arcs, dtype=np.int64).reshape(-1, 2)
    tied = np.array(builder.tied, dtype=np.int64).reshape(-1, 2)
    rows, columns, values = zip(*builder.costs, strict=True) if builder.costs else ((), (), ())
    sets = [[(node, who) for (at, who), node in builder.any_of.items() if at == d] for d in (0, 1)]
    lives = [[(node, tuple(sorted(who))) for node, who in builder.lives[d].items()] for d in (0, 1)]
    return CutModel(
        problem=builder.problem,
        resources=builder.resources,
        nodes=builder.nodes,
        on=(np.array(builder.on[0]), np.array(builder.on[1])),
        tails=arcs[:, 0],
        heads=arcs[:, 1],
        costs=csr_array((values, (rows, columns)), shape=(len(arcs), builder.resources.count)),
        tied_tails=tied[:, 0],
        tied_heads=tied[:, 1],
        any_nodes=(_nodes(sets[0]), _nodes(sets[1])),
        members=(
            _members(sets[0], builder.nodes),
            _members(sets[1], builder.nodes),
        ),
        life_nodes=(_nodes(lives[0]), _nodes(lives[1])),
        life_members=(
            _members(lives[0], builder.nodes),
            _members(lives[1], builder.nodes),
        ),
        life_leaders=np.array([builder.leaders[node] for node, _ in lives[0]], dtype=np.int64),
    )


def _nodes(sets: Sequence[tuple[int, tuple[int, ...]]]) -> Integers:
    return np.array([node for node, _ in sets], dtype=np.int64)


def _members(sets: Sequence[tuple[int, tuple[int, ...]]], nodes: int) -> Any:
    return incidence([who for _, who in sets], nodes)
