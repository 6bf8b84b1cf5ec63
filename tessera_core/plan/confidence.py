"""How surely one strategy beats another: paired draws of kernel times from their 90% intervals.

A draw gives every (signature, device type) one time, lognormal about its median; all strategies are weighed
with the same draws. Draws are counter-based, keyed by what they are for, so that no order of evaluation and
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
from tessera_core.profile.times import Condition

DRAWS = 256
"""A probability near 0.9 then has a standard error of 0.02."""

Z_90 = 1.6448536269514722
"""Standard deviations from the median to either end of a 90% interval."""

Vector = npt.NDArray[np.float64]


def draw_factors(signature: str, device_type: str, low_us: float, high_us: float) -> Vector:
    """Times over median, shape (DRAWS,), for one kernel signature on one device type."""
    if low_us <= 0 or high_us <= low_us:
        return np.ones(DRAWS)
    key = int.from_bytes(hashlib.sha256(f"{signature}|{device_type}".encode()).digest()[:8], "little")
    normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(DRAWS)
    return np.exp(normal * math.log(high_us / low_us) / (2 * Z_90))


def drawn_merit(origin: Origin, plan: Plan, routes: Sequence[RouteChoice], condition: Condition) -> Vector:
    """How good a plan is in every draw, shape (DRAWS,), larger is better; the placement stays as planned.

    Under the throughput policy tokens a second; under latency batches a second with nothing overlapped.
    """
    stated = {(row["route"], row["program"]): row for row in plan.facts["prediction"]["intervals"]}
    total = np.zeros(DRAWS)
    for route, choice in zip(plan.routes, routes, strict=True):
        figures = cost(choice.problem, choice.placement)
        each = np.zeros(DRAWS)
        for p, (name, rate) in enumerate(zip(route.programs, route.rates, strict=True)):
            row = stated[route.route, name]
            loads, path = _changes(origin, choice, p, condition)
            if plan.facts["policy"] == "latency":
                each += rate * np.maximum(figures.serial_us[p] + loads.sum(axis=0), 1e-9)
                continue
            busiest = np.max(np.array(figures.loads_us[p])[:, None] + loads, axis=0)
            interval = np.maximum(busiest, (row["latency_us"] + path) / route.slots)
            interval = np.maximum(interval, max(figures.wire_us[p], 1e-9))
            # What dispatch loses against the formula is taken to stay in proportion.
            each += rate * interval * row["simulated_us"] / row["interval_us"]
        if plan.facts["policy"] == "latency":
            total += route.share * each
        else:
            total += 1e6 * route.batch * tokens_per_request(route) / each
    return 1e6 / total if plan.facts["policy"] == "latency" else total


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
        change = row.median_us * (draw_factors(signature, kind, row.low_us, row.high_us) - 1)
        loads[d] += count * change
        if counted:
            path += count * change
    return loads, path
