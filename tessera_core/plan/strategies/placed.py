"""What all strategies have in common that place kernels over several devices: the best of given placements in
simulation, and slots given back that don't make it faster.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from tessera_core.plan.cluster import GIGABYTE
from tessera_core.plan.placement import Placement, cost
from tessera_core.plan.predict import RouteChoice, predicted, simulated_tokens_per_s
from tessera_core.plan.problem import Problem
from tessera_core.plan.setting import Setting
from tessera_core.plan.strategies.strategy import Candidate, Strategy, slot_choices, smallest
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
        best: tuple[float, RouteChoice] | None = None
        for least, route in sorted(rated, key=lambda item: -item[0]):
            if best is not None and least <= best[0]:
                break  # no simulation is faster than its bound
            merit = simulated_merit(setting, route)
            if best is None or merit > best[0]:
                best = (merit, route)
        if best is None:
            return self.none(self._shortage(setting))
        return settled_candidate(setting, self.name, *best, None)

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


def settled_candidate(
    setting: Setting, strategy: str, merit: float, route: RouteChoice, bound_us: float | None
) -> Candidate:
    """The plan of a route over all devices that has ``merit``, with no more slots than it needs.

    ``bound_us``: no plan of the strategy has a lower objective at the route's slots. Where that is None, or slots were
    given back, the bound holds for any placement, whatever memory there is: fewer slots leave more room.
    """
    fewer = route
    if setting.in_flight is None and route.problem.slots > 1:
        fewer = _fewer_slots(setting, merit, route)
    if bound_us is None or fewer is not route:
        bound_us = relaxed_bound_us(fewer.problem, setting.goal)
    condition = setting.condition(len(route.problem.devices))
    plan = predicted(setting.origin, [fewer], strategy=strategy, condition=condition, bound_us=bound_us)
    return Candidate(
        strategy=strategy,
        plan=plan,
        routes=(fewer,),
        condition=condition,
        reason=f"{len(plan.transfers)} transfers over one iteration of each program",
    )


def ceiling(setting: Setting, problem: Problem, objective_us: float) -> float:
    """The merit (:func:`plan_merit`) of a plan that attains ``objective_us``."""
    tokens = 1 if len(problem.programs) == 1 else 1 + problem.rates[-1]
    worth = 1.0 if setting.goal == "latency" else 1e6 * problem.programs[-1].batch * tokens
    return worth / max(objective_us, 1e-9)


def simulated_merit(setting: Setting, route: RouteChoice) -> float:
    """The merit (:func:`plan_merit`) of the plan of a route over all devices."""
    problem = route.problem
    if setting.goal == "latency":
        return ceiling(setting, problem, cost(problem, route.placement).latency_us(problem.rates))
    return simulated_tokens_per_s(setting.origin, [route], setting.condition(len(problem.devices)))


def _fewer_slots(setting: Setting, merit: float, route: RouteChoice) -> RouteChoice:
    """The same placement with just enough slots to hide its latency, or some more, where that is nearly as fast.

    Every slot costs memory and makes each request wait longer for its next token.
    """
    figures = cost(route.problem, route.placement)
    serial = figures.latency_us(route.problem.rates)
    enough = max(int(serial / max(figures.cycle_resource_us, 1e-9)), 1)
    tried = {enough, enough + 1, 2 * enough, 3 * enough}
    for slots in sorted(slots for slots in tried if slots < route.problem.slots):
        smaller = RouteChoice(problem=replace(route.problem, slots=slots), placement=route.placement)
        if simulated_merit(setting, smaller) >= NEARLY * merit:
            return smaller
    return route


def split_groups(kinds: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ways to part devices (by type) in two groups, the first and the second: by type where there are several, and
    up to four devices also at any point of that order."""
    order = sorted(range(len(kinds)), key=lambda d: (kinds[d], d))
    ends = [n for n in range(1, len(order)) if len(order) <= 4 or kinds[order[n - 1]] != kinds[order[n]]]
    ends = ends or [len(order) // 2]
    parted = [(tuple(sorted(order[:n])), tuple(sorted(order[n:]))) for n in ends]
    return [pair for first, second in parted for pair in ((first, second), (second, first))]
