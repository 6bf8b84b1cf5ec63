"""The bound of a two-device problem by column generation: prices on the resources, the placement that is cheapest at
those prices (a minimum cut), and again, until the mix of placements found costs what no placement undercuts.

This is Dantzig and Wolfe's decomposition ("Decomposition principle for linear programs", Operations Research 8(1),
1960): the master program mixes placements so that the dearest resource is least; its duals are the prices.
The mix is a plan of its own (batches shared out among a few placements), and its bound holds for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera_core.plan.cut import CutModel, Floats
from tessera_core.plan.placement import Placement
from tessera_core.plan.problem import Problem

ROUNDS = 80
"""Far beyond what models have taken (under 30); the bound holds wherever it stops."""
PULL = 0.5
"""How far prices move from the best ones known towards the master's: halfway keeps them from swinging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A mix of placements and what it shows.

    ``shares`` sum to one over ``placements``; ``objective_us``: interval of the mix, infinite where no
    mix of what was found fits in memory; ``bound_us``: no placement, nor any mix, has less.
    ``weights``: the prices that show the bound, per resource.
    """

    placements: tuple[Placement, ...]
    loads: Floats
    shares: Floats
    objective_us: float
    bound_us: float
    weights: Floats


def whole_floor_us(problem: Problem, copies: Sequence[int]) -> float:
    """What the interval is at least because kernels are whole: of kernels that are alike, each of so many devices
    takes a whole number."""
    floor = 0.0
    alike = Counter(
        times
        for unit, times in zip(problem.units, problem.cycle_times, strict=True)
        if not unit.replicable and all(time > 0 for time in times)
    )
    for times, count in alike.items():
        steps = {times[d] * k for d, most in enumerate(copies) for k in range(1, -(-count // most) + 1)}
        for interval in sorted(steps):
            slack = interval * (1 + 1e-9)
            if sum(most * int(slack / times[d]) for d, most in enumerate(copies)) >= count:
                floor = max(floor, interval)
                break
    return floor


def mix(model: CutModel, starts: Sequence[Placement], gap: float, floor_us: float = 0.0) -> Mixed:
    """The best mix, to within ``gap`` of its bound; no interval is less than ``floor_us``.

    Memory counts as if the mix held its placements in proportion: what a bound may assume, and a plan may not.
    """
    problem, resources = model.problem, model.resources
    capacity = np.array([size for size, _ in problem.domains], dtype=float)
    memory = slice(resources.memory(0), resources.memory(len(problem.domains)))
    placements = list(dict.fromkeys(starts))
    loads = model.loads(placements)
    best: Floats | None = None
    bound = 0.0
    objective, shares = np.inf, np.zeros(len(placements))
    for _ in range(ROUNDS):
        objective, shares, prices = _master(model, loads, capacity, floor_us)
        weights = prices if best is None else best + PULL * (prices - best)
        for tried in (weights, prices):
            found, least = model.least(tried)
            free = max(1.0 - float(tried[resources.bounding].sum()), 0.0)
            value = least - float(tried[memory] @ capacity) + free * floor_us
            if value > bound:
                bound, best = value, tried
            new = [placement for placement in found if placement not in placements]
            if new:
                placements += new
                loads = np.concatenate([loads, model.loads(new)])
                break
        else:
            break  # the master's own prices bring nothing new: it is optimal
        if np.isfinite(objective) and objective <= bound * (1 + gap):
            break
    if len(shares) < len(placements):
        objective, shares, _ = _master(model, loads, capacity, floor_us)
    return Mixed(
        placements=tuple(placements),
        loads=loads,
        shares=shares,
        objective_us=objective,
        bound_us=bound,
        weights=best if best is not None else np.zeros(resources.count),
    )


def _master(
    model: CutModel, loads: Floats, capacity: Floats, floor_us: float
) -> tuple[float, Floats, Floats]:
    """Least interval of a mix, its shares, and the price of each resource."""
    from scipy.optimize import linprog

    resources, count = model.resources, len(loads)
    times = loads[:, resources.bounding]
    scale = max(float(np.mean(times.max(axis=1))), 1e-9)
    sizes = np.maximum(capacity, 1.0)
    held = loads[:, resources.memory(0) : resources.memory(len(capacity))]
    # Columns: the shares, the interval, and what is over in memory at a price that no plan pays.
    busy = np.hstack([times.T / scale, np.tile([-1.0, 0.0], (times.shape[1], 1))])
    full = np.hstack([(held / sizes).T, np.tile([0.0, -1.0], (len(capacity), 1))])
    solved = linprog(
        [*np.zeros(count), 1.0, 1e3],
        A_ub=np.vstack([busy, full]),
        b_ub=[*np.zeros(len(busy)), *np.ones(len(full))],
        A_eq=[[*np.ones(count), 0.0, 0.0]],
        b_eq=[1.0],
        bounds=[*[(0, None)] * count, (floor_us / scale, None), (0, None)],
        method="highs",
    )
    assert solved.status == 0, solved.message
    prices = np.zeros(resources.count)
    duals = np.maximum(-solved.ineqlin.marginals, 0.0)
    # Prices of all that bounds the interval sum to one at most, as the bound needs; rounding may have passed it.
    prices[resources.bounding] = duals[: len(busy)] / max(duals[: len(busy)].sum(), 1.0)
    prices[resources.memory(0) : resources.memory(len(capacity))] = duals[len(busy) :] * scale / sizes
    value = float(solved.x[count]) * scale
    return (np.inf if solved.x[-1] > 1e-9 else value), solved.x[:count], prices
