"""One cell: a problem made and solved to a gap, timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from tessera_core.plan.placement import starting_points
from tessera_core.plan.problem import Problem
from tessera_core.plan.shortage import placement_shortage
from tessera_core.plan.solver import Effort
from tessera_core.plan.throughput import Solution, minimise

Limits = Literal["none", "catalogue", "tight"]
"""Memory: without end, what the catalogue says, or so little that it decides what goes where."""
TIGHT = 1.2
"""Memory of all devices together where it is tight, over what a placement on all of them holds at least."""
BUSY_LOAD = 0.5
"""Load average per CPU, beyond the benchmark's own, from which a cell that misses its bar is measured again."""


@dataclass(slots=True)
class Seconds:
    """Seconds of a stretch of work: on the clock, and of this process alone."""

    wall: float = 0.0
    process: float = 0.0

    def plain(self) -> dict[str, float]:
        """For the record."""
        return {"wall_s": round(self.wall, 2), "process_s": round(self.process, 2)}


@contextmanager
def timed() -> Iterator[Seconds]:
    """Seconds of what runs inside."""
    seconds = Seconds()
    wall, process = time.perf_counter(), time.process_time()
    yield seconds
    seconds.wall, seconds.process = time.perf_counter() - wall, time.process_time() - process


def limited(problem: Problem, limits: Limits) -> Problem:
    """The problem with these memory limits."""
    if limits == "none":
        return replace(problem, domains=())
    if limits == "catalogue":
        return problem
    activations = len(problem.devices) * sum(each.size for each in problem.activations)
    state = sum(family.size for family in problem.families)
    needed = sum(resident.size for resident in problem.weights) + problem.slots * (state + activations)
    total = sum(size for size, _ in problem.domains)
    return replace(
        problem,
        domains=tuple((round(TIGHT * needed * size / total), members) for size, members in problem.domains),
    )


def solved(problem: Problem, gap: float) -> Solution:
    """What the planner does for the best placement, from simple starts on."""
    return minimise(problem, "interval", starting_points(problem), Effort(gap=gap))


def measured(make: Callable[[int], Problem], slots: int, limits: Limits, gap: float) -> dict[str, Any]:
    """Seconds to ``gap`` (or to where the planner stops) and the gap reached.

    ``make``: the problem at so many slots. Where nothing fits at ``slots``, at half as many, and so on: the
    record says what was short.
    """
    short: dict[str, str] = {}
    while True:
        with timed() as modelling:
            problem = limited(make(slots), limits)
        with timed() as solving:
            solution = solved(problem, gap)
        if solution.placement is not None or slots == 1:
            break
        short[str(slots)] = placement_shortage(problem)
        slots //= 2
    if solution.placement is None:
        short[str(slots)] = placement_shortage(problem)
    return {
        "kernels": sum(len(program.kernels) for program in problem.programs),
        "units": len(problem.units),
        "slots": slots,
        "model": modelling.plain(),
        "solve": solving.plain(),
        "process_s": round(modelling.process + solving.process, 2),
        "wall_s": round(modelling.wall + solving.wall, 2),
        "gap": None
        if solution.placement is None
        else round(solution.objective_us / solution.bound_us - 1, 4),
        "interval_us": None if solution.placement is None else round(solution.objective_us, 1),
        "bound_us": None if solution.placement is None else round(solution.bound_us, 1),
        **({"does_not_fit": short} if short else {}),
        "load_average": round(os.getloadavg()[0], 1),
    }


def repeated(
    make: Callable[[int], Problem], slots: int, limits: Limits, gap: float, most_s: float
) -> dict[str, Any]:
    """The same; once more where it took longer than ``most_s`` on a busy machine, and both are kept."""
    found = measured(make, slots, limits, gap)
    busy = found["load_average"] > 1 + BUSY_LOAD * (os.cpu_count() or 1)
    if found["process_s"] > most_s and busy:
        again = measured(make, slots, limits, gap)
        first, second = sorted((found, again), key=lambda each: each["process_s"])
        return {**first, "other": second}
    return found
