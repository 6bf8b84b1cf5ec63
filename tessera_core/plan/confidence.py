"""How surely one strategy beats another: paired draws of kernel times from their 90% intervals.

A draw gives every (signature, device type) one time, lognormal about its median; all strategies are weighed
with the same draws. Where a time was not measured, half of its variance is common to the device type: a model
that is wrong about a device is wrong about all its kernels alike, which no number of kernels averages out.
Draws are counter-based, keyed by what they are for, so that no order of evaluation and
no other strategy changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tessera_core.plan.figures import tokens_per_request
from tessera_core.plan.ir import Plan
from tessera_core.plan.placement import cost
from tessera_core.plan.predict import Origin, RouteChoice
from tessera_core.profile.times import Z_90, Condition, TimeRow

DRAWS = 256
"""A probability near 0.9 then has a standard error of 0.02."""

Vector = npt.NDArray[np.float64]


COMMON_VARIANCE = 0.5
"""Share of the variance of a time that was not measured which all kernels of its device type have in common."""


def draw_factors(row: TimeRow) -> Vector:
    """Times over median, shape (DRAWS,), for one kernel signature on one device type."""
    if row.low_us <= 0 or row.high_us <= row.low_us:
        return np.ones(DRAWS)
    normal = _normal(f"{row.signature}|{row.device_type}")
    if row.source != "measured":
        common = _normal(f"|{row.device_type}")
        normal = math.sqrt(1 - COMMON_VARIANCE) * normal + math.sqrt(COMMON_VARIANCE) * common
    return np.exp(normal * math.log(row.high_us / row.low_us) / (2 * Z_90))


def _normal(name: str) -> Vector:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(DRAWS)


def drawn_merit(origin: Origin, plan: Plan, routes: Sequence[RouteChoice], condition: Condition) -> Vector:
    """How good a plan is in every draw, shape (DRAWS,), larger is better; the placement stays as planned.

    Under the throughput policy tokens a second; under latency batches a second with nothing overlapped, on the
    fastest route.
    """
    stated = {row["route"]: row for row in plan.facts["prediction"]["cycles"]}
    latency = plan.facts["policy"] == "latency"
    merits = []
    for route, choice in zip(plan.routes, routes, strict=True):
        figures = cost(choice.problem, choice.placement)
        changes = [_changes(origin, choice, p, condition) for p in range(len(route.programs))]
        rated = list(zip(route.rates, changes, strict=True))
        if latency:
            serial = figures.latency_us(route.rates)
            each = np.maximum(serial + sum(rate * loads.sum(axis=0) for rate, (loads, _) in rated), 1e-9)
        else:
            row = stated[route.route]
            loads = np.array(figures.cycle_loads_us)[:, None] + sum(
                rate * loads for rate, (loads, _) in rated
            )
            least = max([*figures.cycle_wires_us.values(), 1e-9])
            interval = np.maximum(np.max(loads, axis=0), least)
            if row["interval_us"] > row["resource_us"]:  # a slot's iterations wait for each other
                path = sum(rate * path for rate, (_, path) in rated)
                interval = np.maximum(interval, row["interval_us"] + path / route.slots)
            # What dispatch loses against the formula is taken to stay in proportion.
            each = interval * row["simulated_us"] / row["interval_us"]
        merits.append(1e6 / each if latency else 1e6 * route.batch * tokens_per_request(route) / each)
    best: Vector = np.max(merits, axis=0) if latency else np.sum(merits, axis=0)
    return best


def _changes(
    origin: Origin, choice: RouteChoice, position: int, condition: Condition
) -> tuple[Vector, Vector]:
    """By how much every device, shape (devices, DRAWS), and the longest path, (DRAWS,), take longer."""
    problem = choice.problem
    kernels = problem.programs[position].kernels
    on_path = set(problem.paths[position])
    counts: Counter[tuple[str, int, bool]] = Counter()
    for index, (unit, where) in enumerate(zip(problem.units, choice.placement, strict=True)):
        for p, kernel in unit.kernels:
            if p == position:
                counts.update((kernels[kernel].signature, d, index in on_path) for d in where)
    loads = np.zeros((len(problem.devices), DRAWS))
    path = np.zeros(DRAWS)
    for (signature, d, counted), count in counts.items():
        kind = problem.devices[d].type
        row = origin.times.time(signature, kind, condition)
        change = row.median_us * (draw_factors(row) - 1)
        loads[d] += count * change
        if counted:
            path += count * change
    return loads, path
