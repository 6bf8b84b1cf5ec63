"""Placements of a problem's units as plain tuples: their cost, their trimming, and good ones found without
a solver, from which the solver starts.

A placement gives for each unit the devices that it runs on, as a sorted tuple of indices: one device, or
for a replicable state writer every home of its families.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from tessera_core.plan.problem import Problem

Placement = tuple[tuple[int, ...], ...]

BAND_CUTS = 12
"""Cut points tried per boundary of a band heuristic; finer ones rarely survive the first solver node."""

MOVES = 4
"""How often all cuts are tried at one step size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A placement's figures in the cost model; ``excess_bytes``: memory beyond what is there.

    ``loads_us[p][d]``: what device d does in an iteration of program p; ``resource_us[p]``: that of the busiest
    device or link. Over a cycle, ``cycle_loads_us[d]``, ``cycle_wires_us[source, destination]``, and
    ``cycle_path_us``: what one slot's iterations take at least to follow each other.
    """

    loads_us: tuple[tuple[float, ...], ...]
    resource_us: tuple[float, ...]
    serial_us: tuple[float, ...]
    cycle_loads_us: tuple[float, ...]
    cycle_wires_us: Mapping[tuple[int, int], float]
    cycle_path_us: float
    excess_bytes: int
    domain_bytes: tuple[int, ...]

    @property
    def cycle_resource_us(self) -> float:
        """What the busiest device or link does in a cycle."""
        return max(*self.cycle_loads_us, *self.cycle_wires_us.values(), 0.0)

    def interval_us(self, slots: int) -> float:
        """Interval of the cycle: no pipeline of so many slots is faster."""
        return max(self.cycle_resource_us, self.cycle_path_us / slots)

    def latency_us(self, rates: Sequence[int]) -> float:
        """Serial latency of a batch: its iterations one after another."""
        return sum(rate * serial for rate, serial in zip(rates, self.serial_us, strict=True))


def cheapest_source(problem: Problem, size: int, sources: Sequence[int], destination: int) -> int:
    """Which of several devices that hold a buffer sends it."""
    return min(sources, key=lambda s: (problem.cross_us(size, s, destination), s))


def crossings(problem: Problem, placement: Placement) -> list[tuple[int, int, int]]:
    """(flow, source, destination) of everything that a placement ships, in order of the flows."""
    found = []
    for index, flow in enumerate(problem.flows):
        held = placement[flow.producer]
        wanted = {d for unit in flow.consumers for d in placement[unit]} - set(held)
        for d in sorted(wanted):
            found.append((index, cheapest_source(problem, flow.size, held, d), d))
    return found


def homes(problem: Problem, placement: Placement) -> list[tuple[int, ...]]:
    """Devices on which each family lives."""
    return [tuple(sorted({d for u in family.units for d in placement[u]})) for family in problem.families]


def cost(problem: Problem, placement: Placement) -> Cost:
    """Figures of a placement."""
    programs, devices = range(len(problem.programs)), range(len(problem.devices))
    load = [[0.0] * len(devices) for _ in programs]
    wire: list[dict[tuple[int, int], float]] = [defaultdict(float) for _ in programs]
    cycle_load = [0.0 for _ in devices]
    cycle_wire: dict[tuple[int, int], float] = defaultdict(float)
    serial = [0.0 for _ in programs]
    received = [0 for _ in devices]
    used = [[False] * len(devices) for _ in programs]
    for unit, times, where in zip(problem.units, problem.cycle_times, placement, strict=True):
        for d in where:
            cycle_load[d] += times[d]
        for p in {p for p, _ in unit.kernels}:
            for d in where:
                load[p][d] += unit.times[p][d]
                serial[p] += unit.times[p][d]
                used[p][d] = True
    crossed: dict[tuple[int, int], float] = {}
    for index, s, d in crossings(problem, placement):
        flow = problem.flows[index]
        send, receive = problem.send_us(flow.size, s, d), problem.receive_us(flow, s, d)
        link, times_shipped = problem.link_us(flow.size, s, d), problem.shipped(flow)
        load[flow.program][s] += send
        load[flow.program][d] += receive
        wire[flow.program][s, d] += link
        cycle_load[s] += times_shipped * send
        cycle_load[d] += times_shipped * receive
        cycle_wire[s, d] += times_shipped * link
        serial[flow.program] += problem.cross_us(flow.size, s, d)
        received[d] += flow.size
        for unit_index in () if flow.feeds else flow.consumers:
            if d in placement[unit_index]:
                key = (flow.producer, unit_index)
                crossed[key] = max(crossed.get(key, 0.0), problem.cross_us(flow.size, s, d))
    for p in programs:
        for d in devices:
            if used[p][d]:
                load[p][d] += problem.overheads[d]
                cycle_load[d] += problem.rates[p] * problem.overheads[d]
                serial[p] += problem.overheads[d]
    path = [
        sum(problem.units[u].times[p][placement[u][0]] for u in problem.paths[p])
        + sum(crossed.get(pair, 0.0) for pair in pairwise(problem.paths[p]))
        for p in programs
    ]
    fixed = _memory(problem, placement, received)
    domain_bytes = tuple(sum(fixed[d] for d in members) for _, members in problem.domains)
    return Cost(
        loads_us=tuple(tuple(row) for row in load),
        resource_us=tuple(max(*load[p], *wire[p].values(), 0.0) for p in programs),
        serial_us=tuple(serial),
        cycle_loads_us=tuple(cycle_load),
        cycle_wires_us=dict(cycle_wire),
        cycle_path_us=sum(rate * time for rate, time in zip(problem.rates, path, strict=True)),
        excess_bytes=sum(
            max(0, held - size) for held, (size, _) in zip(domain_bytes, problem.domains, strict=True)
        ),
        domain_bytes=domain_bytes,
    )


def trimmed(problem: Problem, placement: Placement) -> Placement:
    """Drop copies of state writers where nothing else of their families runs and nobody takes their output.

    A solver leaves such copies wherever they don't raise the busiest device's load.
    """
    taken: dict[int, set[int]] = defaultdict(set)
    for flow in problem.flows:
        if problem.units[flow.producer].replicable:
            wanted = {d for unit in flow.consumers for d in placement[unit]}
            taken[flow.producer] |= wanted & set(placement[flow.producer])
    return _with_writers(problem, placement, taken)


def single(problem: Problem, device: int) -> Placement:
    """Everything on one device."""
    return tuple((device,) for _ in problem.units)


def settled(problem: Problem, devices: Sequence[int]) -> Placement:
    """A placement from one device per unit: replicable writers then follow whoever reads their state."""
    return _with_writers(problem, [(d,) for d in devices], {})


def _with_writers(
    problem: Problem, placement: Sequence[tuple[int, ...]], taken: Mapping[int, set[int]]
) -> Placement:
    """The placement with replicable units on the fewest devices: where others need the state that they write,
    and in ``taken``. A state that nobody else needs lives where its first writer was."""
    written: dict[int, list[int]] = defaultdict(list)
    read: dict[int, list[int]] = defaultdict(list)
    lives: list[set[int]] = [set() for _ in problem.families]
    for index, family in enumerate(problem.families):
        for unit in family.units:
            if unit in family.writers:
                written[unit].append(index)
                lives[index] |= taken.get(unit, set())
            elif problem.units[unit].replicable:
                read[unit].append(index)
            else:
                lives[index] |= set(placement[unit])
    _settle(lives, written, read)
    for index, family in enumerate(problem.families):
        if not lives[index] and family.writers:
            lives[index].add(min(placement[family.writers[0]]))
            _settle(lives, written, read)
    where = list(placement)
    for unit, indices in written.items():
        where[unit] = tuple(sorted(lives[indices[0]]))
    return tuple(where)


def _settle(
    lives: list[set[int]], written: Mapping[int, Sequence[int]], read: Mapping[int, Sequence[int]]
) -> None:
    """Grow homes until each replicable unit's written families share theirs and what it reads is there too."""
    changed = True
    while changed:
        changed = False
        for unit, indices in written.items():
            own = set().union(*(lives[i] for i in indices))
            for i in indices:
                if lives[i] != own:
                    lives[i] = set(own)
                    changed = True
            for i in read.get(unit, ()):
                if not own <= lives[i]:
                    lives[i] |= own
                    changed = True


def starting_points(problem: Problem) -> list[Placement]:
    """Single devices, bands, and of two devices a program on each.

    Two devices get cuts all around the balanced one.
    """
    count = len(problem.devices)
    found = [single(problem, d) for d in range(count)]
    if count != 2:
        return found + bands(problem)
    depth = _depths(problem)
    for order in ((0, 1), (1, 0)):
        (balanced,) = _balanced(problem, order)
        around = [balanced + (i - BAND_CUTS // 2) / (2 * BAND_CUTS) for i in range(BAND_CUTS + 1)]
        found += [_bands(problem, depth, order, [c]) for c in around if 0 < c < 1]
        if len(problem.programs) == 2:
            found.append(settled(problem, [order[unit.kernels[0][0]] for unit in problem.units]))
    return found


def bands(problem: Problem) -> list[Placement]:
    """The program cut into runs of kernels, one run per device.

    Bands follow the layers where kernels know theirs, so that all programs of a route cut alike and state
    stays where it is. Cuts start from the balanced ones and move while that helps, at last layer by layer; beyond
    three devices only the given order is tried.
    """
    count = len(problem.devices)
    if count == 1:
        return []
    depth = _depths(problem)
    orders = list(permutations(range(count))) if count <= 3 else [tuple(range(count))]
    return [
        band for order in orders for band in _moved_cuts(problem, depth, order, _balanced(problem, order))
    ]


def _balanced(problem: Problem, order: Sequence[int]) -> list[float]:
    """Cuts by the speeds of the devices, as shares of the program."""
    total = [sum(times[d] for times in problem.cycle_times) for d in order]
    speeds = [1 / max(time, 1e-9) for time in total]
    return [sum(speeds[: i + 1]) / sum(speeds) for i in range(len(order) - 1)]


def _bands(
    problem: Problem, depth: Sequence[float], order: Sequence[int], cuts: Sequence[float]
) -> Placement:
    return settled(problem, [order[sum(at >= c for c in cuts)] for at in depth])


def _moved_cuts(
    problem: Problem, depth: Sequence[float], order: Sequence[int], cuts: list[float]
) -> list[Placement]:
    """The balanced bands, and those that moving one cut at a time leads to, in ever smaller steps."""

    def value(placement: Placement) -> tuple[int, float]:
        figures = cost(problem, placement)
        return figures.excess_bytes, figures.interval_us(problem.slots)

    start = best = _bands(problem, depth, order, cuts)
    least = value(best)
    finest = 1 / _layers(problem)
    for step in (0.08, 0.04, 0.02, *([finest] if finest < 0.02 else [])):
        for _ in range(MOVES):
            options = []
            for i in range(len(cuts)):
                for change in (-step, step):
                    moved = sorted([*cuts[:i], cuts[i] + change, *cuts[i + 1 :]])
                    options.append((moved, _bands(problem, depth, order, moved)))
            values = [value(placement) for _, placement in options]
            if min(values) >= least:
                break
            least = min(values)
            cuts, best = options[values.index(least)]
    return [start, best]


def _layers(problem: Problem) -> int:
    return 1 + max(
        (
            kernel.layer
            for program in problem.programs
            for kernel in program.kernels
            if kernel.layer is not None
        ),
        default=0,
    )


def _depths(problem: Problem) -> list[float]:
    """Where a unit lies in its program, 0 to 1, counted in whole layers where kernels know their layer."""
    layers = _layers(problem)
    depths = []
    for unit in problem.units:
        p, k = unit.kernels[0]
        kernels = problem.programs[p].kernels
        layer = kernels[k].layer
        if layers == 1:
            depths.append(k / max(len(kernels), 1))
        elif layer is not None:
            depths.append((layer + 0.5) / layers)
        else:
            known = next((i for i in range(len(kernels)) if kernels[i].layer is not None), 0)
            depths.append(0.0 if k < known else 0.9999)
    return depths


def _memory(problem: Problem, placement: Placement, received: Sequence[int]) -> list[int]:
    held = [problem.slots * size for size in received]
    for resident in problem.weights:
        for d in {d for u in resident.users for d in placement[u]}:
            held[d] += resident.size
    for resident in problem.activations:
        for d in {d for u in resident.users for d in placement[u]}:
            held[d] += problem.slots * resident.size
    for family, where in zip(problem.families, homes(problem, placement), strict=True):
        for d in where:
            held[d] += problem.slots * family.size
    return held
