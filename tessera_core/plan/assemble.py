"""From a placement of units to the rows of a plan: assignments, transfers in their order, and homes."""

from __future__ import annotations

from collections.abc import Callable

from tessera_core.plan.ir import Assignment, Home, Transfer
from tessera_core.plan.placement import Placement, crossings, homes
from tessera_core.plan.problem import Problem
from tessera_formats.deps import WHOLE

KernelTimes = Callable[[str, str], float]
"""(signature, device type) -> microseconds."""


def assignments(problem: Problem, placement: Placement, route: int, times: KernelTimes) -> list[Assignment]:
    """One row per kernel and device, by program, kernel and device."""
    rows = []
    for unit, where in zip(problem.units, placement, strict=True):
        for p, kernel in unit.kernels:
            for d in where:
                signature = problem.programs[p].kernels[kernel].signature
                rows.append(
                    (
                        (p, kernel, d),
                        Assignment(
                            route=route,
                            program=problem.programs[p].name,
                            kernel=kernel,
                            part=WHOLE,
                            device=problem.devices[d].name,
                            time_us=times(signature, problem.devices[d].type),
                        ),
                    )
                )
    rows.sort(key=lambda row: row[0])
    return [row for _, row in rows]


def transfers(problem: Problem, placement: Placement, route: int) -> list[Transfer]:
    """What crosses, in program order of the producers: the one order that both ends keep."""
    rows: list[Transfer] = []
    counts = [0 for _ in problem.programs]
    for index, s, d in crossings(problem, placement):
        flow = problem.flows[index]
        link = problem.links[s, d]
        rows.append(
            Transfer(
                route=route,
                program=problem.programs[flow.program].name,
                order=counts[flow.program],
                buffer=flow.buffer,
                producer=flow.kernel,
                source=problem.devices[s].name,
                destination=problem.devices[d].name,
                bytes=flow.size,
                boxes=flow.boxes,
                combine="copy",
                time_us=link.latency_us + link.wire_us(flow.size),
            )
        )
        counts[flow.program] += 1
    return rows


def home_rows(problem: Problem, placement: Placement, route: int) -> list[Home]:
    """Where each state family of the route lives."""
    return [
        Home(route=route, state=family.name, device=problem.devices[d].name)
        for family, where in zip(problem.families, homes(problem, placement), strict=True)
        for d in where
    ]
