"""The strategies: each turns a setting into the best plan of its kind, at its own batch and number of slots,
or says why it has none. ``auto`` weighs them by simulated throughput and by how sure the difference is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera_core.plan.cluster import Device
from tessera_core.plan.confidence import Vector, drawn_merit
from tessera_core.plan.figures import Held, evaluate
from tessera_core.plan.ir import Plan
from tessera_core.plan.placement import Placement, cost, single, starting_points
from tessera_core.plan.predict import RouteChoice, predicted
from tessera_core.plan.problem import Problem
from tessera_core.plan.setting import Choice, Setting
from tessera_core.plan.shortage import placement_shortage, single_shortage
from tessera_core.plan.throughput import charged, minimise, relaxed_bound_us
from tessera_core.profile.times import Condition
from tessera_formats.errors import InfeasibleError, InputError
from tessera_formats.plan import POLICIES, STRATEGIES
from tessera_formats.profile import SOURCES

PLANNED = {
    "split": "placement",
    "pipeline": "placement",
    "prefill-decode": "placement",
    "attention-ffn": "placement",
}
"""Strategies whose names are known but which come later, and what serves meanwhile."""
BASELINES = ("single", "data-parallel")
SLOT_CHOICES = (8, 4, 2, 1)
"""Numbers of batches in flight that are tried where none is fixed."""
SHARES = tuple(f"{source}_share" for source in SOURCES)
"""How much of the kernels' time is of which kind, as plans state it."""
SURE = 0.9
"""``auto`` leaves the best baseline only where the placement beats it in more draws than this."""
CROSSING_SHARE = 0.005
"""What a crossing is charged at either end beside its cost, in intervals: placements of Llama-3-8B's prefill and
decode on A100 and L40S are fastest in simulation between 0.1% and 1%."""
NEARLY = 0.98
"""Slots are given back as long as this share of the throughput remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy's best plan, or None and the reason."""

    strategy: str
    plan: Plan | None
    routes: tuple[RouteChoice, ...] = ()
    condition: Condition = "alone"
    reason: str = ""


def single_device(setting: Setting) -> Candidate:
    """The best device alone, at its best batch."""
    slots = setting.in_flight or 1
    best: tuple[float, RouteChoice] | None = None
    for device in setting.origin.cluster.devices:
        found = _alone(setting, device, slots)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    if best is None:
        problems = [
            setting.problem(_smallest(setting), [device], slots, "alone")
            for device in setting.origin.cluster.devices
        ]
        return Candidate(strategy="single", plan=None, reason=single_shortage(problems))
    plan = predicted(setting.origin, [best[1]], strategy="single", condition="alone", bound_us=None)
    return Candidate(strategy="single", plan=plan, routes=(best[1],), reason=best[1].problem.devices[0].name)


def data_parallel(setting: Setting) -> Candidate:
    """A copy on every device that holds one, requests shared out by speed."""
    name, cluster = "data-parallel", setting.origin.cluster
    condition = setting.condition(len(cluster.devices), copies=True)
    if len(cluster.devices) < 2:
        return Candidate(strategy=name, plan=None, reason="the cluster has one device")
    first = {device.name: _alone(setting, device, 1, condition) for device in cluster.devices}
    fitting = [device for device in cluster.devices if first[device.name] is not None]
    left_out = [device for device in cluster.devices if first[device.name] is None]
    if len(fitting) < 2:
        problems = [setting.problem(_smallest(setting), [device], 1, "alone") for device in left_out]
        return Candidate(strategy=name, plan=None, reason=single_shortage(problems))
    slots = [1 for _ in fitting]
    if setting.in_flight is not None:
        merits = [found[0] for device in fitting if (found := first[device.name]) is not None]
        if setting.in_flight < len(fitting):
            return Candidate(
                strategy=name,
                plan=None,
                reason=f"{len(fitting)} copies need at least {len(fitting)} batches in flight",
            )
        slots = _apportioned(setting.in_flight, merits)
    routes: list[RouteChoice] = []
    for device, count in zip(fitting, slots, strict=True):
        found = _alone(setting, device, count, condition)
        if found is None:
            problem = setting.problem(_smallest(setting), [device], count, condition)
            return Candidate(strategy=name, plan=None, reason=single_shortage([problem]))
        routes.append(found[1])
    plan = predicted(setting.origin, routes, strategy=name, condition=condition, bound_us=None)
    over = _over_domains(setting, plan)
    if over:
        return Candidate(strategy=name, plan=None, reason=over)
    without = f" (no copy fits {', '.join(device.name for device in left_out)})" if left_out else ""
    return Candidate(
        strategy=name,
        plan=plan,
        routes=tuple(routes),
        condition=condition,
        reason=f"a copy on each of {len(routes)} devices{without}",
    )


def placement(setting: Setting) -> Candidate:
    """Kernels placed over all devices, for every choice of programs.

    The solver's placement competes in simulation with the best one that was found without it, because what
    hides behind what is the simulator's to say; then slots are given back that don't make it faster.
    """
    devices = setting.origin.cluster.devices
    best: tuple[float, Plan, RouteChoice] | None = None
    roomy = [_roomy(setting, choice) for choice in setting.choices]
    ceilings = [_ceiling(setting, problem) for problem, _ in roomy]
    for index in sorted(range(len(roomy)), key=lambda i: -ceilings[i]):
        if best is not None and ceilings[index] < best[0] / NEARLY:
            break  # programs that could be faster by a trifle at most
        problem, starts = roomy[index]
        contenders, bound = _contenders(setting, problem, starts)
        for found in contenders:
            route = RouteChoice(problem=problem, placement=found)
            plan = _placed(setting, route, bound)
            merit = _plan_merit(setting, plan)
            if best is None or merit > best[0]:
                best = (merit, plan, route)
    if best is None:
        problem = setting.problem(
            _smallest(setting), devices, setting.in_flight or 1, setting.condition(len(devices))
        )
        return Candidate(strategy="placement", plan=None, reason=placement_shortage(problem))
    _, plan, route = best
    if setting.in_flight is None and route.problem.slots > 1:
        plan, route = _fewer_slots(setting, plan, route)
    crossing = len(plan.transfers)
    return Candidate(
        strategy="placement",
        plan=plan,
        routes=(route,),
        condition=setting.condition(len(devices)),
        reason=f"{crossing} transfers over one iteration of each program",
    )


def compare(setting: Setting, requested: str) -> tuple[Plan, tuple[Candidate, ...]]:
    """The plan asked for, with every strategy's numbers in it.

    Raises :class:`InputError` for a strategy that comes later, :class:`InfeasibleError` where the one asked
    for (``auto``: every one) has no plan.
    """
    if setting.origin.policy not in POLICIES:
        raise InputError(f"policy {setting.origin.policy!r} is not known; use {' or '.join(POLICIES)}")
    if requested not in STRATEGIES:
        raise InputError(f"strategy {requested!r} is not known; use one of {', '.join(STRATEGIES)}")
    if requested in PLANNED:
        raise InputError(
            f"strategy {requested} is planned for a later version; use {PLANNED[requested]} or auto"
        )
    candidates = tuple(make(setting) for make in MAKERS)
    probabilities = _probabilities(setting, candidates)
    chosen = _pick(setting, requested, candidates, probabilities)
    assert chosen.plan is not None
    rows = [
        {**_row(candidate), "chosen": candidate is chosen, "probability_best": probability}
        for candidate, probability in zip(candidates, probabilities, strict=True)
    ]
    prediction = {
        **chosen.plan.facts["prediction"],
        "probability_best": probabilities[candidates.index(chosen)],
    }
    facts = {**chosen.plan.facts, "requested": requested, "compared": rows, "prediction": prediction}
    return replace(chosen.plan, facts=facts), candidates


MAKERS: tuple[Callable[[Setting], Candidate], ...] = (single_device, data_parallel, placement)


def _alone(
    setting: Setting, device: Device, slots: int, condition: Condition = "alone"
) -> tuple[float, RouteChoice] | None:
    """The best choice of programs on one device, with its merit; None where none fits."""
    best: tuple[float, RouteChoice] | None = None
    for choice in setting.choices:
        problem = setting.problem(choice, [device], slots, condition)
        everything = single(problem, 0)
        figures = cost(problem, everything)
        merit = setting.merit(problem, figures)
        if figures.excess_bytes == 0 and (best is None or merit > best[0]):
            best = (merit, RouteChoice(problem=problem, placement=everything))
    return best


def _smallest(setting: Setting) -> Choice:
    """The choice that asks for the least memory, nearly: the smallest batch."""
    return min(setting.choices, key=lambda choice: (choice.batch, choice.needs[0].program.batch))


def _apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts of at least one, as near to ``weights`` as that allows."""
    parts = [1 for _ in weights]
    for _ in range(total - len(weights)):
        parts[max(range(len(weights)), key=lambda i: (weights[i] / (parts[i] + 1), -i))] += 1
    return parts


def _over_domains(setting: Setting, plan: Plan) -> str:
    """Which shared memory the routes overfill together, or nothing."""
    held: dict[str, Held] = {
        row.device: row for row in evaluate(plan, setting.origin.trace, setting.origin.deps).memory
    }
    for domain, size in setting.origin.cluster.domains.items():
        members = [d.name for d in setting.origin.cluster.devices if d.memory_domain == domain]
        need = sum(held[name].total for name in members)
        if need > size:
            return (
                f"the copies on {', '.join(members)} need {need / 1e9:.1f} GB of the {size / 1e9:.1f} GB of"
                f" {domain} that they share: {(need - size) / 1e9:.1f} GB short"
            )
    return ""


def _roomy(setting: Setting, choice: Choice) -> tuple[Problem, list[Placement]]:
    """The problem at the most slots for which some simple placement fits (or that were asked for)."""
    devices = setting.origin.cluster.devices
    if setting.in_flight is not None:
        counts: tuple[int, ...] = (setting.in_flight,)
    else:
        counts = (1,) if setting.goal == "latency" else SLOT_CHOICES
    for slots in counts:
        problem = setting.problem(choice, devices, slots, setting.condition(len(devices)))
        starts = starting_points(problem)
        if any(cost(problem, start).excess_bytes == 0 for start in starts):
            break
    return problem, starts


def _ceiling(setting: Setting, problem: Problem) -> float:
    """A merit that no placement of ``problem`` exceeds, with transfers and memory for nothing."""
    least = relaxed_bound_us(replace(problem, flows=()), setting.goal)
    tokens = 1 if len(problem.programs) == 1 else 1 + problem.rates[-1]
    worth = 1.0 if setting.goal == "latency" else 1e6 * problem.programs[-1].batch * tokens
    return worth / max(least, 1e-9)


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


def _placed(setting: Setting, route: RouteChoice, bound_us: float) -> Plan:
    condition = setting.condition(len(route.problem.devices))
    return predicted(setting.origin, [route], strategy="placement", condition=condition, bound_us=bound_us)


def _fewer_slots(setting: Setting, plan: Plan, route: RouteChoice) -> tuple[Plan, RouteChoice]:
    """The same placement with just enough slots to hide its latency, where that is nearly as fast.

    Every slot costs memory and makes each request wait longer for its next token. The bound is stated anew,
    without memory: fewer slots leave more room than the solver had.
    """
    rows = plan.facts["prediction"]["cycles"]
    enough = max(math.ceil(row["latency_us"] / max(row["resource_us"], 1e-9) - 1e-9) for row in rows)
    for slots in range(enough, min(enough + 2, route.problem.slots)):
        smaller = RouteChoice(problem=replace(route.problem, slots=slots), placement=route.placement)
        other = _placed(setting, smaller, 0.0)
        if _plan_merit(setting, other) >= NEARLY * _plan_merit(setting, plan):
            bound = relaxed_bound_us(smaller.problem, setting.goal)
            return _placed(setting, smaller, bound), smaller
    return plan, route


def _probabilities(setting: Setting, candidates: Sequence[Candidate]) -> list[float]:
    """Per candidate: share of draws in which it beats the best baseline (for that one: every other)."""
    drawn: dict[str, Vector] = {
        c.strategy: drawn_merit(setting.origin, c.plan, c.routes, c.condition)
        for c in candidates
        if c.plan is not None
    }
    baselines = [c for c in candidates if c.plan is not None and c.strategy in BASELINES]
    if not baselines:
        return [1.0 if c.plan is not None else 0.0 for c in candidates]
    best = max(baselines, key=lambda c: _merit(setting, c)).strategy
    rivals = [values for name, values in drawn.items() if name != best and name in BASELINES]
    probabilities = []
    for c in candidates:
        if c.plan is None:
            probabilities.append(0.0)
        elif c.strategy == best:
            wins = np.all([drawn[best] >= rival for rival in rivals], axis=0) if rivals else np.array([True])
            probabilities.append(float(np.mean(wins)))
        else:
            probabilities.append(float(np.mean(drawn[c.strategy] > drawn[best])))
    return probabilities


def _pick(
    setting: Setting, requested: str, candidates: Sequence[Candidate], probabilities: Sequence[float]
) -> Candidate:
    by_name = {candidate.strategy: candidate for candidate in candidates}
    if requested != "auto":
        if by_name[requested].plan is None:
            raise InfeasibleError(f"strategy {requested} has no plan: {by_name[requested].reason}")
        return by_name[requested]
    baselines = [c for c in candidates if c.plan is not None and c.strategy in BASELINES]
    placed = by_name["placement"]
    if not baselines and placed.plan is None:
        raise InfeasibleError(f"no strategy has a plan: {placed.reason}")
    if not baselines:
        return placed
    best = max(baselines, key=lambda c: _merit(setting, c))
    sure = probabilities[candidates.index(placed)] > SURE
    return placed if sure and _merit(setting, placed) > _merit(setting, best) else best


def _plan_merit(setting: Setting, plan: Plan) -> float:
    """Larger is better under the policy."""
    if setting.goal == "latency":
        return 1 / max(float(plan.facts["prediction"]["objective_us"]), 1e-9)
    return float(plan.facts["prediction"]["tokens_per_s"])


def _merit(setting: Setting, candidate: Candidate) -> float:
    return 0.0 if candidate.plan is None else _plan_merit(setting, candidate.plan)


def _row(candidate: Candidate) -> dict[str, object]:
    """A candidate as the plan's comparison states it."""
    plan = candidate.plan
    if plan is None:
        return {
            "strategy": candidate.strategy,
            "feasible": False,
            "reason": candidate.reason,
            "batch": 0,
            "slots": 0,
            "devices": 0,
            "interval_us": 0.0,
            "latency_us": 0.0,
            "tokens_per_s": 0.0,
            "time_per_token_us": 0.0,
            **dict.fromkeys(SHARES, 0.0),
        }
    prediction = plan.facts["prediction"]
    last = [
        next(
            row
            for row in prediction["intervals"]
            if row["route"] == route.route and row["program"] == route.programs[-1]
        )
        for route in plan.routes
    ]
    nearest = min if plan.facts["policy"] == "latency" else max  # a request alone takes the fastest route
    return {
        "strategy": candidate.strategy,
        "feasible": True,
        "reason": candidate.reason,
        "batch": max(route.batch for route in plan.routes),
        "slots": sum(route.slots for route in plan.routes),
        "devices": len({row.device for row in plan.assignments}),
        "interval_us": 1 / sum(1 / max(row["simulated_us"], 1e-9) for row in last),
        "latency_us": nearest(row["latency_us"] for row in last),
        "tokens_per_s": prediction["tokens_per_s"],
        "time_per_token_us": prediction["time_per_token_us"],
        **{name: prediction[name] for name in SHARES},
    }
