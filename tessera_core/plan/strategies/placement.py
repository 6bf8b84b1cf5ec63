"""Kernels placed over all devices, each on its own merits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera_core.plan.placement import Placement, cost, starting_points
from tessera_core.plan.predict import RouteChoice
from tessera_core.plan.problem import Problem
from tessera_core.plan.setting import Choice, Setting
from tessera_core.plan.shortage import placement_shortage
from tessera_core.plan.strategies.halves import AttentionFfn, PrefillDecode
from tessera_core.plan.strategies.placed import NEARLY, ceiling, settled_candidate, simulated_merit
from tessera_core.plan.strategies.strategy import Candidate, Strategy, slot_choices, smallest
from tessera_core.plan.throughput import charged, minimise, relaxed_bound_us

CROSSING_SHARE = 0.005
"""What a crossing is charged at either end beside its cost, in intervals: placements of Llama-3-8B's prefill and
decode on A100 and L40S are fastest in simulation between 0.1% and 1%."""


class KernelPlacement(Strategy):
    """Each kernel on its own device, for every choice of programs.

    The solver's placement competes in simulation with the best one that was found without it, because what
    hides behind what is the simulator's to say; then slots are given back that don't make it faster.
    """

    name = "placement"
    baseline = False

    def best(self, setting: Setting) -> Candidate:
        """Its best plan, or why there is none."""
        devices = setting.origin.cluster.devices
        best: tuple[float, RouteChoice, float] | None = None
        roomy = [_roomy(setting, choice) for choice in setting.choices]
        ceilings = [_ceiling(setting, problem) for problem, _ in roomy]
        for index in sorted(range(len(roomy)), key=lambda i: -ceilings[i]):
            if best is not None and ceilings[index] < best[0] / NEARLY:
                break  # programs that could be faster by a trifle at most
            problem, starts = roomy[index]
            contenders, bound = _contenders(setting, problem, starts)
            for found in contenders:
                route = RouteChoice(problem=problem, placement=found)
                merit = simulated_merit(setting, route)
                if best is None or merit > best[0]:
                    best = (merit, route, bound)
        if best is None:
            condition = setting.condition(len(devices))
            problem = setting.problem(smallest(setting), devices, setting.in_flight or 1, condition)
            return self.none(placement_shortage(problem))
        return settled_candidate(setting, self.name, *best)


def _roomy(setting: Setting, choice: Choice) -> tuple[Problem, list[Placement]]:
    """The problem at the most slots for which some simple placement fits (or that were asked for)."""
    devices = setting.origin.cluster.devices
    for slots in slot_choices(setting):
        problem = setting.problem(choice, devices, slots, setting.condition(len(devices)))
        starts = starting_points(problem)
        for halves in (PrefillDecode(), AttentionFfn()):
            starts += halves.starting_points(setting, problem)
        if any(cost(problem, start).excess_bytes == 0 for start in starts):
            break
    return problem, starts


def _ceiling(setting: Setting, problem: Problem) -> float:
    """A merit that no placement of ``problem`` exceeds, with transfers and memory for nothing."""
    return ceiling(setting, problem, relaxed_bound_us(replace(problem, flows=()), setting.goal))


def _contenders(
    setting: Setting, problem: Problem, starts: Sequence[Placement]
) -> tuple[list[Placement], float]:
    """Placements worth simulating, and the bound below which none lies: the solver's, the solver's where
    crossing is charged more, and the best start that fits."""
    solution = minimise(problem, setting.goal, starts)
    found = [solution.placement]
    if setting.goal == "interval":
        found.append(minimise(charged(problem, CROSSING_SHARE), setting.goal, starts).placement)
    rated = [(cost(problem, start), start) for start in starts]
    fitting = [
        (setting.merit(problem, figures), start) for figures, start in rated if not figures.excess_bytes
    ]
    if fitting:
        found.append(max(fitting, key=lambda pair: pair[0])[1])
    return [placement for placement in dict.fromkeys(found) if placement is not None], solution.bound_us
