"""What published points around a size say about the model there: its residual, and how far the points scatter.

The residual (the logarithm of table time over physical time) is smooth between neighbouring sizes where the library
picks alike, and noise where it doesn't. A Gaussian process over the nearest points (Rasmussen and Williams, "Gaussian
Processes for Machine Learning", 2006, sections 2.2 and 5.4.2) takes what is smooth; the points, each predicted by the
others, say how much is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tessera_core.profile.model.demand import Floats, Sizes

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

NEAREST = 24
"""Points that a prediction rests on: twice as many take eight times as long and change nothing.

This and the three figures below were chosen by how narrow the intervals of training shapes become that predict each
other; errors hardly depend on them.
"""

LENGTH = 3.0
"""Distance over which residuals stay alike, in factors of two."""

REACH = 4.0
"""Distance at which the points around say little of how far off a prediction may be."""

NOISE = 0.8
"""Variance of a point of its own, relative to what it shares with its neighbours."""

STRETCH = 1.5
"""The last size (rows of a batch, context, tokens) counts this many times: libraries switch kernels along it."""

BLOCK = 4096
"""Sizes that are solved at once; limits memory to about 100 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Arrays over kernels. ``residual``: to be added to the logarithm of the physical time. ``scatter``: mean
    absolute residual of the points around, each predicted by the others. ``near``: 1 at a point, 0 far from all.
    """

    residual: Floats
    scatter: Floats
    near: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbours:
    """Points of a table. ``order``: the sizes that place a point, the last one stretched.

    ``residual_at``: residuals of the points with given indices; asked late, as few of many points are ever near.
    """

    order: tuple[str, ...]
    tree: cKDTree
    residual_at: Callable[[npt.NDArray[np.intp]], Floats]

    def at(self, sizes: Sizes) -> Correction:
        """What the points around say at ``sizes``, columns of one length."""
        places = coordinates(sizes, self.order)
        found = [self._block(places[start : start + BLOCK]) for start in range(0, max(len(places), 1), BLOCK)]
        residual, scatter, near = (np.concatenate(column) for column in zip(*found))
        return Correction(residual=residual, scatter=scatter, near=near)

    def _block(self, places: Floats) -> tuple[Floats, Floats, Floats]:
        count = min(NEAREST, self.tree.n)
        distance, index = self.tree.query(places, k=range(1, count + 1))
        around = np.asarray(self.tree.data)[index]
        between = np.sqrt(((around[:, :, None] - around[:, None]) ** 2).sum(axis=-1))
        covariance = np.exp(-between / LENGTH) + NOISE * np.eye(count)
        unique, inverse = np.unique(index, return_inverse=True)
        values = self.residual_at(unique)[inverse.reshape(index.shape)]
        inverted = np.linalg.inv(covariance)
        weights = np.einsum("qij,qj->qi", inverted, values)
        shared = np.exp(-distance / LENGTH)
        # Leaving one point out needs no second solution: Rasmussen and Williams, equation 5.12.
        left_out = np.abs(weights / np.einsum("qii->qi", inverted))
        scatter = (shared * left_out).sum(axis=1) / np.maximum(shared.sum(axis=1), 1e-300)
        return (shared * weights).sum(axis=1), scatter, np.exp(-((distance[:, 0] / REACH) ** 2))


def coordinates(sizes: Sizes, order: Sequence[str]) -> Floats:
    """Places of sizes, shape (kernels, len(order)): factors of two, the last one stretched."""
    columns = [np.log2(np.maximum(sizes[name], 0.5)) for name in order]
    columns[-1] = columns[-1] * STRETCH
    return np.stack(columns, axis=1)


def neighbours(
    sizes: Sizes, order: Sequence[str], residual_at: Callable[[npt.NDArray[np.intp]], Floats]
) -> Neighbours:
    """Points at ``sizes``, ready to be asked."""
    from scipy.spatial import cKDTree  # late: takes a third of a second

    return Neighbours(order=tuple(order), tree=cKDTree(coordinates(sizes, order)), residual_at=residual_at)
