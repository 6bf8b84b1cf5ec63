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

    ``shares`` sum to one over ``placements``; ``objective_us``: rate-weighted interval of the mix, infinite where no
    mix of what was found fits in memory; ``bound_us``: no placement, nor any mix, has less.
    ``weights``: the prices that show the bound, per resource.
    """

    placements: tuple[Placement, ...]
    loads: Floats
    shares: Floats
    objective_us: float
    bound_us: float
    weights: Floats


def whole_floors_us(problem: Problem, copies: Sequence[int]) -> Floats:
    """What each program's interval is at least because kernels are whole: of kernels that are alike, each of so many
    devices takes a whole number."""
    floors = np.zeros(len(problem.programs))
    for p in range(len(problem.programs)):
        alike = Counter(
            unit.times[p]
            for unit in problem.units
            if not unit.replicable and all(time > 0 for time in unit.times[p])
        )
        for times, count in alike.items():
            steps = {times[d] * k for d, most in enumerate(copies) for k in range(1, -(-count // most) + 1)}
            for interval in sorted(steps):
                slack = interval * (1 + 1e-9)
                if sum(most * int(slack / times[d]) for d, most in enumerate(copies)) >= count:
                    floors[p] = max(floors[p], interval)
                    break
    return floors


def mix(
    model: CutModel, starts: Sequence[Placement], gap: float, floors_us: Floats | None = None
) -> Mixed:
    """The best mix, to within ``gap`` of its bound; no program's interval is less than its ``floors_us``.

    Memory counts as if the mix held its placements in proportion: what a bound may assume, and a plan may not.
    """
    problem, resources = model.problem, model.resources
    capacity = np.array([size for size, _ in problem.domains], dtype=float)
    memory = slice(resources.memory(0), resources.memory(0) + len(problem.domains))
    placements = list(dict.fromkeys(starts))
    loads = model.loads(placements)
    floors = np.zeros(len(problem.programs)) if floors_us is None else floors_us
    best: Floats | None = None
    bound = 0.0
    objective, shares = np.inf, np.zeros(len(placements))
    for _ in range(ROUNDS):
        objective, shares, prices = _master(model, loads, capacity, floors)
        weights = prices if best is None else best + PULL * (prices - best)
        for tried in (weights, prices):
            found, least = model.least(tried)
            free = np.array(problem.rates) - np.array(
                [tried[list(resources.rows(p))].sum() for p in range(len(problem.programs))]
            )
            value = least - float(tried[memory] @ capacity) + float(np.maximum(free, 0.0) @ floors)
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
        objective, shares, _ = _master(model, loads, capacity, floors)
    return Mixed(
        placements=tuple(placements),
        loads=loads,
        shares=shares,
        objective_us=objective,
        bound_us=bound,
        weights=best if best is not None else np.zeros(resources.count),
    )


def _master(
    model: CutModel, loads: Floats, capacity: Floats, floors: Floats
) -> tuple[float, Floats, Floats]:
    """Least rate-weighted interval of a mix, its shares, and the price of each resource."""
    from scipy.optimize import linprog

    problem, resources = model.problem, model.resources
    count, programs = len(loads), len(problem.programs)
    scale = max(float(np.mean(loads[:, : 5 * programs].max(axis=1))), 1e-9)
    rows, limits, columns = [], [], []
    for p in range(programs):
        for column in resources.rows(p):
            row = np.zeros(count + programs + 1)
            row[:count] = loads[:, column] / scale
            row[count + p] = -1.0
            rows.append(row)
            limits.append(0.0)
            columns.append(column)
    for domain, size in enumerate(capacity):
        row = np.zeros(count + programs + 1)
        row[:count] = loads[:, resources.memory(domain)] / max(size, 1.0)
        row[-1] = -1.0  # what is over, at a price that no plan pays
        rows.append(row)
        limits.append(1.0)
        columns.append(resources.memory(domain))
    costs = np.concatenate([np.zeros(count), np.array(problem.rates, dtype=float), [1e3 * sum(problem.rates)]])
    total = np.concatenate([np.ones(count), np.zeros(programs + 1)])
    solved = linprog(
        costs,
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=total[None],
        b_eq=[1.0],
        bounds=[(0, None)] * count + [(floor / scale, None) for floor in floors] + [(0, None)],
        method="highs",
    )
    assert solved.status == 0, solved.message
    prices = np.zeros(resources.count)
    duals = np.maximum(-solved.ineqlin.marginals, 0.0)
    for column, dual in zip(columns, duals, strict=True):
        of_memory = column >= resources.memory(0)
        size = capacity[column - resources.memory(0)] if of_memory else 1.0
        prices[column] = dual * scale / max(size, 1.0) if of_memory else dual
    over = solved.x[-1] > 1e-9
    value = float(np.array(problem.rates) @ solved.x[count : count + programs]) * scale
    return (np.inf if over else value), solved.x[:count], _normed(model, prices)


def _normed(model: CutModel, prices: Floats) -> Floats:
    """Prices whose sum over a program's rows is its rate at most, as the bound needs; rounding may have passed it."""
    for p, rate in enumerate(model.problem.rates):
        rows = list(model.resources.rows(p))
        total = prices[rows].sum()
        if total > rate:
            prices[rows] *= rate / total
    return prices
