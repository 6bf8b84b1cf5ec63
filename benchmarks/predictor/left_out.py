"""The target GPU is left out: nothing of its table touches a coefficient, a weight or a width.

Its coefficients are fitted to the other GPUs of its kind of memory. How much of the source's residual to carry, and
how wide intervals are, comes from leaving the others out in turn, each predicted without itself and the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.predictor.accuracy import COVERAGE, Predicted, rounded
from benchmarks.predictor.fitting import fit, sampled
from benchmarks.predictor.points import GPUS, Points, points, shared
from benchmarks.predictor.seen import HELD_OUT, WEIGHTS, residuals
from tessera_core.profile.model.coefficients import memory_kind
from tessera_core.profile.model.demand import Floats
from tessera_core.profile.model.physical import Coefficients
from tessera_core.profile.silicon.tables import SiliconPackage


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What is known for a GPU without a table: coefficients, share of a residual to carry, half-widths."""

    members: tuple[str, ...]
    fitted: Coefficients
    carried: float
    half_width: float
    half_width_carried: float

    def predict(self, source: Points, target: Points) -> Predicted:
        """The target's times from the source's at the same sizes."""
        own = residuals(source, self.fitted)
        return Predicted(
            time_us=target.physical(self.fitted) * np.exp(self.carried * own),
            half_width=np.full(len(own), self.half_width_carried),
            actual_us=target.time_us,
        )


def members(package: SiliconPackage, kind: str, memory: str, without: Iterable[str]) -> tuple[str, ...]:
    """GPUs with a table of a class and a kind of memory; of any memory, where none is left of it."""
    known = [gpu for gpu in GPUS if gpu not in set(without) and points(package, gpu, kind) is not None]
    alike = [gpu for gpu in known if _memory(package, gpu, kind) == memory]
    return tuple(alike or known)


def _memory(package: SiliconPackage, gpu: str, kind: str) -> str:
    found = points(package, gpu, kind)
    assert found is not None
    return memory_kind(found.chip())


@cache
def _fitted(package: SiliconPackage, kind: str, gpus: tuple[str, ...], everything: bool) -> Coefficients:
    return fit([_training(package, gpu, kind, everything) for gpu in gpus])


@cache
def _training(package: SiliconPackage, gpu: str, kind: str, everything: bool) -> Points:
    found = points(package, gpu, kind)
    assert found is not None
    return sampled(found if everything else found.select(found.shares() >= HELD_OUT))


@cache
def _pair(
    package: SiliconPackage, kind: str, source: str, target: str, everything: bool
) -> tuple[Points, Points]:
    """Training points of the target that the source has as well."""
    other = points(package, source, kind)
    assert other is not None
    mine, theirs = shared(_training(package, target, kind, everything), other)
    return theirs, mine


@cache
def left_out(
    package: SiliconPackage, kind: str, memory: str, without: tuple[str, ...], everything: bool = False
) -> LeftOut:
    """What is known for a GPU with this kind of memory, of which ``without`` is never looked at.

    ``everything``: held-out shapes are fitted too, as for the file that is shipped.
    """
    absent = set(without)
    gpus = members(package, kind, memory, absent)
    theirs: list[Floats] = []
    mine: list[Floats] = []
    for proxy in members(package, kind, "", absent):
        rest = members(package, kind, _memory(package, proxy, kind), {*absent, proxy})
        fitted = _fitted(package, kind, rest, everything)
        for source in members(package, kind, "", {*absent, proxy}):
            first, second = _pair(package, kind, source, proxy, everything)
            theirs.append(residuals(first, fitted))
            mine.append(residuals(second, fitted))
    carried, actual = np.concatenate(theirs), np.concatenate(mine)
    errors = [float(np.median(np.abs(weight * carried - actual))) for weight in WEIGHTS]
    weight = float(WEIGHTS[int(np.argmin(errors))])
    return LeftOut(
        members=gpus,
        fitted=_fitted(package, kind, gpus, everything),
        carried=rounded(weight),
        half_width=rounded(np.quantile(np.abs(actual), COVERAGE)),
        half_width_carried=rounded(np.quantile(np.abs(actual - weight * carried), COVERAGE)),
    )
