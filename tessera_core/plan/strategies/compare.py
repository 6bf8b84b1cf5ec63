"""Strategies weighed against each other: each turns a setting into the best plan of its kind, at its own batch and
number of slots, or says why it has none. ``auto`` weighs them by simulated throughput and by how sure the difference
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tessera_core.plan.confidence import Vector, drawn_merit
from tessera_core.plan.ir import Plan
from tessera_core.plan.setting import Setting
from tessera_core.plan.strategies.copies import DataParallel, Single
from tessera_core.plan.strategies.halves import AttentionFfn, PrefillDecode
from tessera_core.plan.strategies.layers import Pipeline
from tessera_core.plan.strategies.placement import KernelPlacement
from tessera_core.plan.strategies.strategy import Candidate, Strategy, plan_merit
from tessera_formats.errors import InfeasibleError, InputError
from tessera_formats.plan import POLICIES, STRATEGIES
from tessera_formats.profile import SOURCES

KNOWN: tuple[Strategy, ...] = (
    Single(),
    DataParallel(),
    Pipeline(),
    PrefillDecode(),
    AttentionFfn(),
    KernelPlacement(),
)
"""In the order in which plans list them."""
BASELINES = tuple(strategy.name for strategy in KNOWN if strategy.baseline)
PLANNED = {"split": "placement"}
"""Strategies whose names are known but which come later, and what serves meanwhile."""
SHARES = tuple(f"{source}_share" for source in SOURCES)
"""How much of the kernels' time is of which kind, as plans state it."""
SURE = 0.9
"""``auto`` leaves the best baseline only where the placement beats it in more draws than this."""


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
    candidates = tuple(strategy.best(setting) for strategy in KNOWN)
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
    placed = by_name[KernelPlacement.name]
    if not baselines and placed.plan is None:
        raise InfeasibleError(f"no strategy has a plan: {placed.reason}")
    if not baselines:
        return placed
    best = max(baselines, key=lambda c: _merit(setting, c))
    sure = probabilities[candidates.index(placed)] > SURE
    return placed if sure and _merit(setting, placed) > _merit(setting, best) else best


def _merit(setting: Setting, candidate: Candidate) -> float:
    return 0.0 if candidate.plan is None else plan_merit(setting, candidate.plan)


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
