"""The placement with the least interval at a given number of slots, or the least serial latency: HiGHS from
the best start that fits, with a lower bound that no placement undercuts in this cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tessera_core.plan.matrix import Goal
from tessera_core.plan.placement import Cost, Placement, cost, single, trimmed
from tessera_core.plan.problem import Problem
from tessera_core.plan.solver import DEFAULT_EFFORT, Effort, solve

LARGEST = 5_000
"""Flows times pairs of devices. Two devices are always solved in seconds: a thousand kernels have 2,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best placement found (None: none fits), what it costs, and the bound below which none lies."""

    placement: Placement | None
    cost: Cost | None
    objective_us: float
    bound_us: float


def minimise(
    problem: Problem, goal: Goal, starts: Sequence[Placement], effort: Effort = DEFAULT_EFFORT
) -> Solution:
    """Minimise the rate-weighted interval at ``problem.slots`` slots, or the serial latency.

    ``starts``: placements tried first; the best that fits in memory starts the solver. Equal inputs give
    equal placements. ``bound_us`` is infinite where no placement fits.
    """
    if len(problem.devices) == 1:
        return _single_device(problem, goal)
    rated = [(cost(problem, start), start) for start in starts]
    scale = max(min(_objective(problem, goal, figures) for figures, _ in rated), 1e-6)
    fitting = [pair for pair in rated if pair[0].excess_bytes == 0]
    fitting.sort(key=lambda pair: _objective(problem, goal, pair[0]))
    if too_large(problem):
        values, bound = None, relaxed_bound_us(problem, goal)
    else:
        values, bound = solve(problem, goal, scale, fitting[0][1] if fitting else None, effort)
    options = [placement for _, placement in fitting[:1]]
    if values is not None:
        options.append(_read(problem, values))
    best = Solution(placement=None, cost=None, objective_us=float("inf"), bound_us=bound)
    for option in options:
        placement = trimmed(problem, option)
        figures = cost(problem, placement)
        objective = _objective(problem, goal, figures)
        if figures.excess_bytes == 0 and objective < best.objective_us:
            best = Solution(
                placement=placement, cost=figures, objective_us=objective, bound_us=min(bound, objective)
            )
    return best


def too_large(problem: Problem) -> bool:
    """Whether the solver is left out: many devices and many flows, for which it takes minutes."""
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
    """A lower bound from the linear relaxation: with the memory that there is, or for any.

    Where the problem is :func:`too_large`, also whatever is shipped: looser, and still below every placement.
    """
    free = replace(
        problem,
        domains=problem.domains if memory else (),
        flows=() if too_large(problem) else problem.flows,
    )
    starts = [_objective(free, goal, cost(free, single(free, d))) for d in range(len(free.devices))]
    if len(starts) == 1:
        return starts[0]
    return solve(free, goal, max(min(starts), 1e-6), None, Effort(nodes=0))[1]


def _single_device(problem: Problem, goal: Goal) -> Solution:
    placement: Placement = tuple((0,) for _ in problem.units)
    figures = cost(problem, placement)
    objective = _objective(problem, goal, figures)
    if figures.excess_bytes:
        return Solution(placement=None, cost=None, objective_us=float("inf"), bound_us=float("inf"))
    return Solution(placement=placement, cost=figures, objective_us=objective, bound_us=objective)


def _objective(problem: Problem, goal: Goal, figures: Cost) -> float:
    if goal == "interval":
        return figures.interval_us(problem.rates, problem.slots)
    return figures.latency_us(problem.rates)


def _read(problem: Problem, values: npt.NDArray[np.float64]) -> Placement:
    count = len(problem.devices)
    chosen = values[: len(problem.units) * count].reshape(len(problem.units), count)
    return tuple(tuple(int(d) for d in np.flatnonzero(row > 0.5)) or (int(np.argmax(row)),) for row in chosen)
