"""What is too heavy to cross between two types of devices: a flow whose one crossing keeps a link busy for longer than
the interval cannot cross, so what it joins stays within one type.

The mix of placements that bounds a problem of types (:mod:`tessera_core.plan.columns`) spreads a crossing over all
links between the types, and mixes placements that don't cross at all. A placement that is better than T crosses
nothing that takes a link more than T; then the largest part that such flows join is on one type or the other, and the
lesser of the two bounds holds. There are only as many T to look at as there are different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera_core.plan.columns import Mixed
from tessera_core.plan.problem import Flow, Problem
from tessera_core.plan.types import Types, between_types

PROHIBITIVE = 1_000
"""What may not be is charged so many times over. Any factor leaves the bound true; this one keeps fractions out."""
WITHIN_US = 1e-9
"""Relative; weights that differ by less are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The problem of placements that cross nothing heavier than ``most_us``, with the part that this joins on
    ``device``; and its mix."""

    most_us: float
    device: int
    problem: Problem
    mixed: Mixed


def crossing_us(problem: Problem, flow: Flow) -> float:
    """How long one crossing of ``flow``, over a cycle, keeps one link or its sender busy at least."""
    return problem.shipped(flow) * min(
        max(problem.send_us(flow.size, s, d), problem.link_us(flow.size, s, d)) for s, d in problem.links
    )


def branched(
    problem: Problem, bound_us: float, mixed: Callable[[Problem], Mixed]
) -> tuple[float, list[Branch]]:
    """A bound of a problem of two types that knows what cannot cross, and the branches looked at, least first.

    ``bound_us``: the bound without it; ``mixed``: the mix that bounds a problem. No branch where nothing is heavier
    than the bound.
    """
    weights = sorted({crossing_us(problem, flow) for flow in problem.flows})
    if not weights or weights[-1] <= bound_us:
        return bound_us, []
    known: dict[int, list[Branch]] = {}

    def least_us(index: int) -> float:
        """The bound of placements that cross nothing heavier than a weight."""
        if index not in known:
            tied, part = _tied(problem, weights[index])
            sides = [_on(tied, part, (device,)) for device in (0, 1)]
            known[index] = [
                Branch(most_us=weights[index], device=device, problem=side, mixed=mixed(side))
                for device, side in enumerate(sides)
            ]
        return min(branch.mixed.bound_us for branch in known[index])

    low, high = 0, len(weights) - 1  # the first weight that is no less than what avoiding all above it costs
    while low < high:
        middle = (low + high) // 2
        if weights[middle] >= least_us(middle):
            high = middle
        else:
            low = middle + 1
    # A placement that crosses a weight is no better than that; one that doesn't, than the bound without.
    proven = least_us(low)
    if low:
        proven = min(max(weights[low], proven), least_us(low - 1))
    branches = sorted(
        (each for pair in known.values() for each in pair), key=lambda each: each.mixed.bound_us
    )
    return max(bound_us, proven), branches


def confined(problem: Problem, types: Types, objective_us: float) -> list[Problem]:
    """The problem without its transfers, once for each type on which the largest part lies that no placement better
    than ``objective_us`` can cut; one of them bounds all such placements. As it was where nothing is that heavy."""
    between = between_types(problem, types)
    _, part = _tied(between, objective_us)
    free = replace(problem, flows=())
    return [free] if len(part) == 1 else [_on(free, part, members) for members in types.members]


def _tied(problem: Problem, most_us: float) -> tuple[Problem, list[int]]:
    """The problem in which nothing heavier than ``most_us`` crosses, and the units of the largest part so joined."""
    parent = list(range(len(problem.units)))

    def root(unit: int) -> int:
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    flows = []
    for flow in problem.flows:
        heavy = crossing_us(problem, flow) > most_us * (1 + WITHIN_US)
        flows.append(replace(flow, size=flow.size * PROHIBITIVE) if heavy else flow)
        for unit in (flow.producer, *flow.consumers) if heavy else ():
            if not problem.units[unit].replicable and not problem.units[flow.producer].replicable:
                parent[root(unit)] = root(flow.producer)
    parts: dict[int, list[int]] = {}
    for unit in range(len(problem.units)):
        parts.setdefault(root(unit), []).append(unit)
    largest = max(parts.values(), key=lambda part: sum(_work_us(problem, unit) for unit in part))
    return replace(problem, flows=tuple(flows)), largest


def _work_us(problem: Problem, unit: int) -> float:
    times = problem.units[unit].times
    return sum(rate * min(each) for rate, each in zip(problem.rates, times, strict=True))


def _on(problem: Problem, part: Sequence[int], devices: Sequence[int]) -> Problem:
    """The problem in which ``part`` runs on ``devices``."""
    inside = set(part)
    units = tuple(
        replace(
            unit,
            times=tuple(
                tuple(time if d in devices else time * PROHIBITIVE for d, time in enumerate(times))
                for times in unit.times
            ),
        )
        if index in inside
        else unit
        for index, unit in enumerate(problem.units)
    )
    return replace(problem, units=units)
