"""What all strategies have in common that place kernels over several devices: the best of given placements in
simulation, and slots given back that don't make it faster.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from tessera_core.plan.cluster import GIGABYTE
from tessera_core.plan.ir import Plan
from tessera_core.plan.placement import Placement, cost
from tessera_core.plan.predict import RouteChoice, bounded, predicted
from tessera_core.plan.problem import Problem
from tessera_core.plan.setting import Setting
from tessera_core.plan.strategies.strategy import Candidate, Strategy, plan_merit, slot_choices, smallest
from tessera_core.plan.throughput import relaxed_bound_us

NEARLY = 0.98
"""Slots are given back as long as this share of the throughput remains."""
SIMULATED = 2
"""Placements of one choice of programs that are simulated: by formula the best."""


class Shared(Strategy):
    """Kernels shared out over all devices by a rule, which leaves a handful of placements."""

    what: str
    """What a placement by the rule is called in messages."""

    @abstractmethod
    def refusal(self, setting: Setting) -> str:
        """Why the rule cannot hold for any placement; empty where it can."""

    @abstractmethod
    def placements(self, setting: Setting, problem: Problem) -> list[Placement]:
        """The placements that follow the rule."""

    def best(self, setting: Setting) -> Candidate:
        """The best in simulation, at its best programs and slots, or why there is none."""
        devices = setting.origin.cluster.devices
        refusal = "the cluster has one device" if len(devices) < 2 else self.refusal(setting)
        if refusal:
            return self.none(refusal)
        rated: list[tuple[float, RouteChoice]] = []
        for choice in setting.choices:
            for slots in slot_choices(setting):
                problem = setting.problem(choice, devices, slots, setting.condition(len(devices)))
                fitting = self._fitting(setting, problem)
                if fitting:
                    rated += [
                        (merit, RouteChoice(problem=problem, placement=found))
                        for merit, found in fitting[:SIMULATED]
                    ]
                    break
        best: tuple[float, Plan, RouteChoice] | None = None
        for merit, route in sorted(rated, key=lambda item: -item[0]):
            if best is not None and merit <= best[0]:
                break  # no simulation is faster than its bound
            plan = placed(setting, route, self.name)
            if best is None or plan_merit(setting, plan) > best[0]:
                best = (plan_merit(setting, plan), plan, route)
        if best is None:
            return self.none(self._shortage(setting))
        _, plan, route = best
        if setting.in_flight is None and route.problem.slots > 1:
            plan, route = fewer_slots(setting, plan, route)
        if not plan.facts["prediction"]["lower_bound_us"]:
            plan = bounded(plan, relaxed_bound_us(route.problem, setting.goal))
        return Candidate(
            strategy=self.name,
            plan=plan,
            routes=(route,),
            condition=setting.condition(len(devices)),
            reason=f"{len(plan.transfers)} transfers over one iteration of each program",
        )

    def _fitting(self, setting: Setting, problem: Problem) -> list[tuple[float, Placement]]:
        """Those that fit with their merit by formula, the best first."""
        found = []
        for placement in dict.fromkeys(self.placements(setting, problem)):
            figures = cost(problem, placement)
            if not figures.excess_bytes:
                serial = setting.goal == "latency"
                least = figures.latency_us(problem.rates) if serial else figures.interval_us(problem.slots)
                found.append((ceiling(setting, problem, least), placement))
        return sorted(found, key=lambda item: -item[0])

    def _shortage(self, setting: Setting) -> str:
        devices = setting.origin.cluster.devices
        condition = setting.condition(len(devices))
        problem = setting.problem(smallest(setting), devices, slot_choices(setting)[-1], condition)
        over = min(cost(problem, p).excess_bytes for p in self.placements(setting, problem))
        return (
            f"no {self.what} fits the memory: the nearest is {over / GIGABYTE:.3g} GB over; trace a smaller batch,"
            " or use --strategy placement"
        )


def placed(setting: Setting, route: RouteChoice, strategy: str, bound_us: float = 0.0) -> Plan:
    """The plan of one route over all devices; ``bound_us`` as :func:`bounded` takes it."""
    condition = setting.condition(len(route.problem.devices))
    return predicted(setting.origin, [route], strategy=strategy, condition=condition, bound_us=bound_us)


def ceiling(setting: Setting, problem: Problem, objective_us: float) -> float:
    """The merit (:func:`plan_merit`) of a plan that attains ``objective_us``."""
    tokens = 1 if len(problem.programs) == 1 else 1 + problem.rates[-1]
    worth = 1.0 if setting.goal == "latency" else 1e6 * problem.programs[-1].batch * tokens
    return worth / max(objective_us, 1e-9)


def fewer_slots(setting: Setting, plan: Plan, route: RouteChoice) -> tuple[Plan, RouteChoice]:
    """The same placement with just enough slots to hide its latency, where that is nearly as fast.

    Every slot costs memory and makes each request wait longer for its next token. The bound is stated anew,
    without memory: fewer slots leave more room than the solver had.
    """
    (row,) = plan.facts["prediction"]["cycles"]
    enough = math.ceil(row["latency_us"] / max(row["resource_us"], 1e-9) - 1e-9)
    strategy = str(plan.facts["strategy"])
    for slots in range(enough, min(enough + 2, route.problem.slots)):
        smaller = RouteChoice(problem=replace(route.problem, slots=slots), placement=route.placement)
        other = placed(setting, smaller, strategy)
        if plan_merit(setting, other) >= NEARLY * plan_merit(setting, plan):
            return bounded(other, relaxed_bound_us(smaller.problem, setting.goal)), smaller
    return plan, route


def split_groups(kinds: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ways to part devices (by type) in two groups, the first and the second: by type where there are several, and
    up to four devices also at any point of that order."""
    order = sorted(range(len(kinds)), key=lambda d: (kinds[d], d))
    ends = [n for n in range(1, len(order)) if len(order) <= 4 or kinds[order[n - 1]] != kinds[order[n]]]
    ends = ends or [len(order) // 2]
    parted = [(tuple(sorted(order[:n])), tuple(sorted(order[n:]))) for n in ends]
    return [pair for first, second in parted for pair in ((first, second), (second, first))]
