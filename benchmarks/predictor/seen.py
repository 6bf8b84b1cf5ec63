"""The target GPU's table may be fitted: how well shapes that were held out are predicted, and how surely.

Of a class's shapes a quarter is held out, a part calibrates the intervals, the rest is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.predictor.accuracy import COVERAGE, Predicted, rounded
from benchmarks.predictor.fitting import fit
from benchmarks.predictor.points import Points, points, shared
from tessera_core.profile.model.demand import Floats
from tessera_core.profile.model.neighbours import Correction, Neighbours, neighbours
from tessera_core.profile.model.physical import Coefficients
from tessera_core.profile.model.tables import ORDER, half_widths
from tessera_core.profile.silicon.tables import SiliconPackage

HELD_OUT, CALIBRATING = 0.25, 0.4
"""Shapes whose share lies below the first are held out, below the second calibrate."""

WEIGHTS = np.linspace(0, 1, 21)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What was learned of one class on one GPU from its training shapes."""

    points: Points
    fitted: Coefficients
    around: Neighbours
    scatter_factor: float
    half_width: float

    def correction(self, asked: Points) -> Correction:
        """What the training points say around other points of the same GPU."""
        return self.around.at(asked.sizes)

    def predict(self, asked: Points) -> Predicted:
        """Times of other points of the same GPU."""
        found = self.correction(asked)
        return Predicted(
            time_us=asked.physical(self.fitted) * np.exp(found.residual),
            half_width=half_widths(found, self.scatter_factor, self.half_width),
            actual_us=asked.time_us,
        )


def grouped_level(calibrating: Points) -> float:
    """The quantile to take for the coverage wanted: with few shapes a higher one, as points of one shape err alike.

    The level of split conformal prediction (Lei and others, "Distribution-Free Predictive Inference for Regression",
    2018, section 2.2), counting shapes.
    """
    count = len(set(calibrating.shares().tolist()))
    return min(COVERAGE * (1 + 1 / max(count, 1)), 1.0)


def residuals(asked: Points, fitted: Coefficients) -> Floats:
    """Logarithms of time over physical time."""
    found: Floats = np.log(asked.time_us / asked.physical(fitted))
    return found


@cache
def seen(package: SiliconPackage, gpu: str, kind: str) -> Seen | None:
    """Fit, neighbours and calibration from a GPU's own table; None where it has none."""
    every = points(package, gpu, kind)
    if every is None:
        return None
    shares = every.shares()
    training = every.select(shares >= CALIBRATING)
    calibrating = every.select((shares >= HELD_OUT) & (shares < CALIBRATING))
    fitted = fit([training])
    values = residuals(training, fitted)
    around = neighbours(training.sizes, ORDER[kind], lambda index: values[index])
    misses = residuals(calibrating, fitted)
    level = grouped_level(calibrating)
    half_width = float(np.quantile(np.abs(misses), level))
    found = around.at(calibrating.sizes)
    left = np.abs(misses - found.residual)
    # Half-widths are the factor times this, plus what distance adds.
    scatter = half_widths(found, 1.0, 0.0)
    beyond = half_widths(found, 0.0, half_width)
    factor = float(np.quantile((left - beyond) / scatter, level))
    return Seen(
        points=every,
        fitted=fitted,
        around=around,
        scatter_factor=rounded(max(factor, 0.0)),
        half_width=rounded(half_width),
    )


def carried_weight(source: Seen, target: Seen, corrected: bool) -> float:
    """The share of the source's residual that predicts the target's calibrating points best (least median error).

    ``corrected``: residuals beyond what neighbours say, as where the target's table is at hand.
    """
    first, second = shared(source.points, target.points)
    shares = second.shares()
    rows = (shares >= HELD_OUT) & (shares < CALIBRATING)
    first, second = first.select(rows), second.select(rows)
    theirs, mine = residuals(first, source.fitted), residuals(second, target.fitted)
    if corrected:
        theirs, mine = theirs - source.correction(first).residual, mine - target.correction(second).residual
    errors = [float(np.median(np.abs(np.expm1(weight * theirs - mine)))) for weight in WEIGHTS]
    return float(WEIGHTS[int(np.argmin(errors))])
