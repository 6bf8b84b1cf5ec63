"""The target GPU's table may be fitted: how well shapes that were held out are predicted, and how surely.

Of a class's shapes a quarter is held out. The others are fitted, and predict each other to calibrate intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.predictor.accuracy import COVERAGE, Predicted, rounded
from benchmarks.predictor.fitting import fit
from benchmarks.predictor.points import Points, points
from tessera_core.profile.model.demand import Floats
from tessera_core.profile.model.neighbours import Correction, Neighbours, neighbours
from tessera_core.profile.model.physical import Coefficients
from tessera_core.profile.model.tables import ORDER, half_widths
from tessera_core.profile.silicon.tables import SiliconPackage

HELD_OUT = 0.25
"""Shapes whose share lies below are held out."""

FOLDS = 5
"""Parts of the training shapes, each predicted from the others to calibrate the intervals (cross-conformal)."""

WEIGHTS = np.linspace(0, 1, 21)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What was learned of one class on one GPU from its training shapes.

    ``own``: residuals of the training points, ``crossed``: what points of other shapes say of each.
    """

    points: Points
    fitted: Coefficients
    around: Neighbours
    training: Points
    own: Floats
    crossed: Correction
    scatter_factor: float
    half_width: float

    def predict(self, asked: Points) -> Predicted:
        """Times of other points of the same GPU."""
        found = self.around.at(asked.sizes)
        return Predicted(
            time_us=asked.physical(self.fitted) * np.exp(found.residual),
            half_width=half_widths(found, self.scatter_factor, self.half_width),
            actual_us=asked.time_us,
        )


def grouped_level(training: Points) -> float:
    """The quantile to take for the coverage wanted: with few shapes a higher one, as points of one shape err alike.

    The level of split conformal prediction (Lei and others, "Distribution-Free Predictive Inference for Regression",
    2018, section 2.2), counting shapes.
    """
    count = len(set(training.shares().tolist()))
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
    training = every.select(shares >= HELD_OUT)
    fitted = fit([training])
    values = residuals(training, fitted)
    residual, scatter, near = np.empty((3, len(values)))
    fold = fold_of(training)
    for number in range(FOLDS):
        asked, rest = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        if len(asked) and len(rest):
            found = _around(training.select(rest), values[rest]).at(training.select(asked).sizes)
            residual[asked], scatter[asked], near[asked] = found.residual, found.scatter, found.near
    crossed = Correction(residual=residual, scatter=scatter, near=near)
    level = grouped_level(training)
    half_width = float(np.quantile(np.abs(values), level))
    # Half-widths are the factor times the first, plus what distance adds.
    each, beyond = half_widths(crossed, 1.0, 0.0), half_widths(crossed, 0.0, half_width)
    factor = float(np.quantile((np.abs(values - residual) - beyond) / each, level))
    return Seen(
        points=every,
        fitted=fitted,
        around=_around(training, values),
        training=training,
        own=values,
        crossed=crossed,
        scatter_factor=rounded(max(factor, 0.0)),
        half_width=rounded(half_width),
    )


def fold_of(training: Points) -> npt.NDArray[np.int64]:
    """In which of :data:`FOLDS` parts the shape of every training point is."""
    return ((training.shares() - HELD_OUT) / (1 - HELD_OUT) * FOLDS).astype(np.int64)


def _around(known: Points, values: Floats) -> Neighbours:
    return neighbours(known.sizes, ORDER[known.kind], lambda index: values[index])


def carried_weight(source: Seen, target: Seen, corrected: bool) -> float:
    """The share of the source's residual that predicts the target's training points best (least median error).

    ``corrected``: residuals beyond what neighbours say, as where the target's table is at hand.
    """
    first = source.own - (source.crossed.residual if corrected else 0.0)
    second = target.own - (target.crossed.residual if corrected else 0.0)
    place = {key: row for row, key in enumerate(target.training.keys)}
    pairs = [(row, place[key]) for row, key in enumerate(source.training.keys) if key in place]
    if not pairs:
        return 0.0
    theirs = first[[row for row, _ in pairs]]
    mine = second[[row for _, row in pairs]]
    errors = [float(np.median(np.abs(np.expm1(weight * theirs - mine)))) for weight in WEIGHTS]
    return float(WEIGHTS[int(np.argmin(errors))])
