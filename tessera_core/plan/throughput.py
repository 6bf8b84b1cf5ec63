"""The placement with the least interval at a given number of slots, or the least serial latency, with a lower bound
that no placement undercuts in this cost model.

Devices of at most two types are solved by cuts: their mix gives the bound, which then learns what is too heavy to
cross, and the placements nearest to the mix are improved by local search. Small problems, and those that a memory limit
makes hard, are then handed to HiGHS with the best placement found. Of more than two types, large problems have a looser
bound, from which transfers are left out but for the heaviest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tessera_core.plan.blend import blended, program_order
from tessera_core.plan.columns import Mixed, mix, whole_floor_us
from tessera_core.plan.cut import CutModel, cut_model
from tessera_core.plan.heavy import branched, confined
from tessera_core.plan.loads import load_model
from tessera_core.plan.matrix import Goal
from tessera_core.plan.placement import Cost, Placement, cost, settled, single, trimmed
from tessera_core.plan.problem import Problem
from tessera_core.plan.search import improved
from tessera_core.plan.solver import DEFAULT_EFFORT, Effort, solve
from tessera_core.plan.types import Types, among, between_types, expanded, types_of

LARGEST = 5_000
"""Flows times pairs of devices up to which HiGHS is asked; beyond, it takes minutes."""
SMALL = 300
"""Units up to which HiGHS closes a gap that cuts and local search have left."""
PAIRS = 2
"""Pairs of types, of more than two, that are tried without the others: those that are fastest together."""
STEPS = 40_000
"""Steps of local search: one to three seconds."""
NEAR, FAR = 0.001, 0.005
"""How hot the search begins: from a placement near the bound, and from one that may be far."""
MIX_GAP = 0.001
"""How near the mix of placements comes to its bound; a tenth of what plans are solved to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best placement found (None: none fits), what it costs, and the bound below which none lies."""

    placement: Placement | None
    cost: Cost | None
    objective_us: float
    bound_us: float


@dataclass(slots=True)
class _Best:
    """The best placement of those offered that fit. ``nearest``: the one made from the mix that shows the bound."""

    problem: Problem
    goal: Goal
    placement: Placement | None = None
    cost: Cost | None = None
    objective_us: float = float("inf")
    bound_us: float = 0.0
    nearest: Placement | None = None

    def offer(self, placements: Iterable[Placement]) -> None:
        """Take whatever is better."""
        for placement in placements:
            kept = trimmed(self.problem, placement)
            figures = cost(self.problem, kept)
            objective = _objective(self.problem, self.goal, figures)
            if figures.excess_bytes == 0 and objective < self.objective_us:
                self.placement, self.cost, self.objective_us = kept, figures, objective

    def within(self, gap: float) -> bool:
        """Whether no placement is better by more than ``gap``."""
        return self.objective_us <= self.bound_us * (1 + gap)

    @property
    def solution(self) -> Solution:
        return Solution(
            placement=self.placement,
            cost=self.cost,
            objective_us=self.objective_us,
            bound_us=min(self.bound_us, self.objective_us),
        )


def minimise(
    problem: Problem, goal: Goal, starts: Sequence[Placement], effort: Effort = DEFAULT_EFFORT
) -> Solution:
    """Minimise the interval of a cycle at ``problem.slots`` slots, or the serial latency.

    ``starts``: placements tried first. Equal inputs give equal placements. ``bound_us`` is infinite where no
    placement fits.
    """
    if len(problem.devices) == 1:
        return _single_device(problem, goal)
    if problem.domains and _needs_bytes(problem) > sum(size for size, _ in problem.domains):
        return Solution(placement=None, cost=None, objective_us=float("inf"), bound_us=float("inf"))
    best = _Best(problem, goal)
    best.offer(starts)
    types = types_of(problem)
    if goal == "latency":
        if len(problem.devices) == 2:
            best.bound_us = _least_serial(best)
    elif len(types.members) == 2:
        _by_cuts(best, types, effort.gap)
    elif too_large(problem):
        _by_pairs(best, types, effort.gap)
    if goal == "interval" and not best.within(effort.gap) and len(problem.units) > SMALL:
        _by_search(best, starts, effort.gap)
    if not best.within(effort.gap) and (
        len(problem.units) <= SMALL or best.placement is None or not best.bound_us
    ):
        _by_solver(best, starts, effort)
    return best.solution


def too_large(problem: Problem) -> bool:
    """Whether HiGHS is left out: many devices and many flows, for which it takes minutes."""
    pairs = len(problem.devices) * (len(problem.devices) - 1)
    return len(problem.flows) * pairs > LARGEST


def charged(problem: Problem, share: float) -> Problem:
    """The problem with every transfer dearer at both ends, by ``share`` of the best single device's interval, and at
    the receiver's by a segment.

    A full pipeline loses time wherever slots wait for each other, and it waits where placements cross. The cost
    model cannot say how long; a placement that crosses less for hardly more load is the better one in simulation.
    """
    alone = min(
        _objective(problem, "interval", cost(problem, single(problem, d)))
        for d in range(len(problem.devices))
    )
    extra = share * alone / max(sum(problem.rates), 1)
    links = {
        pair: replace(
            link,
            send_us=link.send_us + extra,
            receive_us=link.receive_us + extra + problem.overheads[pair[1]],
        )
        for pair, link in problem.links.items()
    }
    return replace(problem, links=links)


def relaxed_bound_us(problem: Problem, goal: Goal, memory: bool = False) -> float:
    """A lower bound without whole placements: with the memory that there is, or for any.

    Where the problem is :func:`too_large` and has more than two types, also whatever is shipped: looser, and still
    below every placement.
    """
    free = problem if memory else replace(problem, domains=())
    if len(free.devices) == 1:
        return _objective(free, goal, cost(free, single(free, 0)))
    types = types_of(free)
    if goal == "interval" and len(types.members) == 2:
        return _mixed_bound_us(free, types)
    free = replace(free, flows=()) if too_large(free) else free
    starts = [_objective(free, goal, cost(free, single(free, d))) for d in range(len(free.devices))]
    return solve(free, goal, max(min(starts), 1e-6), None, Effort(nodes=0))[1]


def _least_serial(best: _Best) -> float:
    """One cut: the least serial latency of two devices, for any memory; its placement is offered."""
    problem = best.problem
    model = cut_model(problem)
    weights = np.zeros(model.resources.count)
    weights[model.resources.serial] = 1.0
    placements, bound = model.least(weights)
    best.offer(placements)
    return bound


def _mixed_bound_us(problem: Problem, types: Types) -> float:
    between = between_types(problem, types)
    model = cut_model(between, (types.copies[0], types.copies[1]))
    starts = [single(between, d) for d in (0, 1)]
    return mix(model, starts, MIX_GAP, whole_floor_us(between, types.copies)).bound_us


def _confined_bound_us(best: _Best) -> float:
    """Of many types, the bound without transfers, but for what is too heavy for them."""
    problem = best.problem
    sides = confined(problem, types_of(problem), best.objective_us)
    return min(best.objective_us, *(relaxed_bound_us(side, best.goal) for side in sides))


def _by_cuts(best: _Best, types: Types, gap: float) -> None:
    """The bound of two types, and placements near the mix that shows it."""
    problem = best.problem
    between, copies = between_types(problem, types), (types.copies[0], types.copies[1])
    starts, floor = [single(between, d) for d in (0, 1)], whole_floor_us(between, copies)

    def mixed(of: Problem, links: int = 0) -> tuple[CutModel, Mixed]:
        model = cut_model(of, copies, links)
        return model, mix(model, starts, MIX_GAP, floor)

    model, found = mixed(between)
    best.bound_us = max(best.bound_us, found.bound_us)
    if best.within(gap) or not found.shares.any():
        return
    if copies == (1, 1):
        best.nearest = blended(model, found, best.bound_us * (1 + gap))
        best.offer([best.nearest])
        return
    bound, branches = branched(between, best.bound_us, lambda of: mixed(of)[1])
    best.bound_us = max(best.bound_us, bound)
    parts = sorted(
        ((max(each.most_us, each.mixed.bound_us), each.problem) for each in branches),
        key=lambda pair: pair[0],
    )
    order, loads = program_order(problem), load_model(problem)
    for least, of in parts or [(bound, between)]:
        for links in (max(copies), 2):  # what is shipped takes as many links as pieces of layers meet on
            if best.within(gap) or least >= best.objective_us:
                return
            model, found = mixed(of, links)
            chosen = [where[0] for where in blended(model, found, found.bound_us * (1 + gap))]
            best.offer([settled(problem, expanded(loads, types, chosen, order).tolist())])


def _by_pairs(best: _Best, types: Types, gap: float) -> None:
    """Of many types, what two of them do without the others, where that may be better than what is known."""
    problem = best.problem
    speeds = [
        len(members) / max(_objective(problem, best.goal, cost(problem, single(problem, members[0]))), 1e-9)
        for members in types.members
    ]
    pairs = sorted(combinations(range(len(speeds)), 2), key=lambda pair: -sum(speeds[t] for t in pair))
    for pair in pairs[:PAIRS]:
        devices = sorted(d for t in pair for d in types.members[t])
        part = among(problem, devices)
        found = _Best(part, best.goal)
        _by_cuts(found, types_of(part), gap)
        if found.placement is not None:
            best.offer([tuple(tuple(devices[d] for d in where) for where in found.placement)])


def _by_search(best: _Best, starts: Sequence[Placement], gap: float) -> None:
    problem = best.problem
    fallback = starts[-1] if starts else single(problem, 0)
    near = len(problem.devices) == 2
    for start in dict.fromkeys((best.nearest or best.placement or fallback, best.placement or fallback)):
        if not best.within(gap):
            devices = improved(
                problem,
                [where[0] for where in start],
                program_order(problem).tolist(),
                STEPS,
                hottest=NEAR if near else FAR,
                enough_us=best.bound_us * (1 + gap),
            )
            best.offer([settled(problem, devices)])


def _by_solver(best: _Best, starts: Sequence[Placement], effort: Effort) -> None:
    """HiGHS from the best placement; where the problem is too large for it, a bound without transfers."""
    problem, goal = best.problem, best.goal
    if too_large(problem):
        if not best.bound_us:
            best.bound_us = (
                _confined_bound_us(best) if goal == "interval" else relaxed_bound_us(problem, goal)
            )
        return
    scale = max(min(_objective(problem, goal, cost(problem, start)) for start in starts), 1e-6)
    values, bound = solve(problem, goal, scale, best.placement, effort)
    best.bound_us = max(best.bound_us, bound)
    if values is not None:
        best.offer([_read(problem, values)])


def _needs_bytes(problem: Problem) -> int:
    """What every placement holds somewhere."""
    lasting = sum(resident.size for resident in problem.weights)
    return lasting + problem.slots * sum(family.size for family in problem.families)


def _single_device(problem: Problem, goal: Goal) -> Solution:
    placement: Placement = tuple((0,) for _ in problem.units)
    figures = cost(problem, placement)
    objective = _objective(problem, goal, figures)
    if figures.excess_bytes:
        return Solution(placement=None, cost=None, objective_us=float("inf"), bound_us=float("inf"))
    return Solution(placement=placement, cost=figures, objective_us=objective, bound_us=objective)


def _objective(problem: Problem, goal: Goal, figures: Cost) -> float:
    if goal == "interval":
        return figures.interval_us(problem.slots)
    return figures.latency_us(problem.rates)


def _read(problem: Problem, values: npt.NDArray[np.float64]) -> Placement:
    count = len(problem.devices)
    chosen = values[: len(problem.units) * count].reshape(len(problem.units), count)
    return tuple(tuple(int(d) for d in np.flatnonzero(row > 0.5)) or (int(np.argmax(row)),) for row in chosen)
