"""HiGHS, made quiet and repeatable: one thread, a fixed seed, and work limited by gap and nodes instead of the
clock.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_core.plan.matrix import Goal, build
from tessera_core.plan.placement import Placement
from tessera_core.plan.problem import Problem

RELATIVE_GAP = 0.01
"""Times are not known better than this, and the last thousandths cost most of the time."""
NODE_BUDGET = 900_000
"""Nodes times units squared. Work is limited by nodes, not by the clock, so that equal inputs give equal plans."""
SAFETY_SECONDS = 120.0
"""Far beyond what the node limit needs; only there so that a surprise ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """When the solver may stop: at this gap, or after this many nodes (None: by size; 0: relaxation only)."""

    gap: float = RELATIVE_GAP
    nodes: int | None = None


DEFAULT_EFFORT = Effort()


def solve(
    problem: Problem, goal: Goal, scale: float, start: Placement | None, effort: Effort
) -> tuple[npt.NDArray[np.float64] | None, float]:
    """Values of the columns (None: nothing found) and the bound in microseconds."""
    import highspy  # late: planning is the only stage that needs it

    model, interval = build(problem, goal, scale)
    rows, columns = model.rows, len(model.upper)
    integers = len(problem.units) * len(problem.devices)
    costs = np.zeros(columns)
    costs[interval] = 1.0
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(rows.lower)
    lp.col_cost_ = costs
    lp.col_lower_ = np.zeros(columns)
    lp.col_upper_ = np.array(model.upper)
    lp.row_lower_, lp.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(rows.starts)
    lp.a_matrix_.index_ = np.array(rows.columns)
    lp.a_matrix_.value_ = np.array(rows.values)
    if effort.nodes != 0:
        whole, part = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole if column < integers else part for column in range(columns)]
    solver = _quiet(highspy.Highs)
    options: dict[str, bool | int | float] = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": effort.gap,
        "mip_max_nodes": effort.nodes or max(1, NODE_BUDGET // len(problem.units) ** 2),
        "time_limit": SAFETY_SECONDS,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    if start is not None:
        count = len(problem.devices)
        chosen = np.zeros(integers)
        for u, where in enumerate(start):
            chosen[[u * count + d for d in where]] = 1.0
        solver.setSolution(integers, np.arange(integers, dtype=np.int32), chosen)
    solver.run()
    if start is not None and not _consistent(solver, costs):
        solver.clearSolver()
        solver.run()
    info = solver.getInfo()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None, float("inf")
    if effort.nodes == 0:
        return None, info.objective_function_value * scale
    bound = max(info.mip_dual_bound, 0.0) * scale
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return None, bound
    return np.array(solver.getSolution().col_value), bound


def _consistent(solver: Any, costs: npt.NDArray[np.float64]) -> bool:
    """Whether the columns that the solver returns are those of the objective that it reports.

    HiGHS 1.16 may report the optimum that it found and return the start that it was given.
    """
    info = solver.getInfo()
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return True
    value = float(costs @ np.array(solver.getSolution().col_value))
    reported = float(info.objective_function_value)
    return abs(value - reported) <= 1e-6 * max(abs(reported), 1.0)


def _quiet(make: Callable[[], Any]) -> Any:
    """A solver made with standard output shut: the first one of a process prints a banner from C, which would
    end up in a plan written to standard output."""
    sys.stdout.flush()
    library = ctypes.CDLL(None)
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        solver = make()
        library.fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)
    return solver
