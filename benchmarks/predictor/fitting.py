"""Fits the physical model's coefficients to published times: robust least squares of logarithms, with a prior.

The prior keeps what the points don't tell (where only a product of two coefficients shows) at sensible figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.predictor.points import Points
from tessera_core.profile.model.demand import Floats
from tessera_core.profile.model.physical import NAMES, Coefficients, physical_time

SEED = 0
SAMPLE = 1500
"""Points of each GPU that a fit sees, drawn evenly."""

PRIOR = Coefficients(
    compute=0.75,
    memory=0.87,
    cache=4.35,
    capacity=0.1,
    sharpness=2.0,
    floor_us=2.0,
    chain_us=0.4,
    border=20.0,
    blend=3.0,
    round_us=0.3,
    split_us=1.0,
)
DIGITS = 4
"""Digits of a coefficient that are kept."""

PRIOR_WEIGHT = 2.0
"""A coefficient off by a factor of e weighs as much as this, squared, against squared logarithms of times."""

STEP = 0.01
"""Change of a logarithm over which slopes are taken."""

STARTS: Sequence[Mapping[str, float]] = ({}, {"compute": 2.0, "border": 4.0}, {"compute": 2.0, "cache": 0.6})
"""Factors on the prior from which fits start; the best end counts, as the choice among tiles makes valleys."""

TOLERATED = 0.1
"""Logarithms further off than this count by their size, not their square."""


def sampled(points: Points, count: int = SAMPLE) -> Points:
    """At most ``count`` of the points, always the same ones."""
    if len(points.keys) <= count:
        return points
    rows = np.random.default_rng(SEED).choice(len(points.keys), count, replace=False)
    return points.select(np.sort(rows))


def fit(seen: Sequence[Points]) -> Coefficients:
    """Coefficients that all of ``seen`` (one class, one or several GPUs) share."""
    samples = [sampled(points) for points in seen]
    known = [(points.demand(), points.chip(), np.log(points.time_us)) for points in samples]
    centre = np.log([getattr(PRIOR, name) for name in NAMES])

    def residuals(moved: Floats) -> Floats:
        # Around 1, so that a relative step is a step of that size: choices make the times too rough for less.
        fitted = coefficients(centre + moved - 1)
        misses = [np.log(physical_time(demand, chip, fitted)) - times for demand, chip, times in known]
        return np.concatenate([*misses, PRIOR_WEIGHT * (moved - 1)])

    tried = [
        least_squares(residuals, start, loss="soft_l1", f_scale=TOLERATED, max_nfev=100, diff_step=STEP)
        for start in _starts()
    ]
    best = min(tried, key=lambda found: float(found.cost))
    exact = np.exp(centre + best.x - 1)
    return Coefficients(**{name: float(f"{value:.{DIGITS}g}") for name, value in zip(NAMES, exact)})


def _starts() -> list[Floats]:
    starts = []
    for changed in STARTS:
        start = np.ones(len(NAMES))
        for name, factor in changed.items():
            start[NAMES.index(name)] += np.log(factor)
        starts.append(start)
    return starts


def coefficients(logarithms: Floats) -> Coefficients:
    """Coefficients from their logarithms, in the order of :data:`NAMES`."""
    return Coefficients(**dict(zip(NAMES, np.exp(logarithms).tolist())))
