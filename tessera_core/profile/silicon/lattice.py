"""Values at the points of a ragged lattice, and between them: one size after another is bracketed by its nearest
measured values, the coarsest first, and values are linear in the logarithm of each size.

A size of which the next measured value lacks some finer one is bracketed by the value after it; where no bracket
remains the point is outside the table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = 2
"""How many measured values are tried on either side before a bracket is given up."""

CONTINUED = float(np.log(4.0))
"""Logarithm of the factor by which a size may exceed the largest measured one, where the values have settled."""

SETTLED, APART = 0.1, 0.2
"""Values have settled where the last differs by no more from one this far (as a logarithm) before it: the time follows
its roofline from there on."""

SAME = 1e-9
LEAST = 0.04
"""Added to the difference of two neighbours: where they happen to agree a point between them need not."""

Node: TypeAlias = tuple[list[float], list[int]]


@dataclass(frozen=True, slots=True)
class Value:
    """A value; ``variance``: the square of half its interval; ``distance``: largest logarithmic gap to a point.

    ``least``, ``most``: the limits between which the points used leave it, of :attr:`Lattice.limits`.
    """

    value: float
    variance: float
    distance: float
    least: float
    most: float
    continued: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Points by coordinates (one row per level, lexicographically sorted) and their values.

    ``limits``: what never falls as a coordinate grows, a logarithm of time: between points it lies between theirs.
    ``exact``: levels that are never interpolated. ``growing``: levels that may be continued past the last value.
    ``between``, ``beyond``: per level, by what to multiply the difference of two neighbours and :data:`LEAST` for half
    an interval between them, and past the last of them.
    """

    coordinates: NDArray[np.float64]
    values: NDArray[np.float64]
    limits: NDArray[np.float64]
    exact: frozenset[int]
    growing: frozenset[int]
    between: tuple[float, ...]
    beyond: tuple[float, ...]
    nodes: dict[tuple[int, int, int], Node] = field(default_factory=dict)

    def at(
        self,
        point: Sequence[float],
        skip: int | None = None,
        hidden: float = 0.0,
        without: int | None = None,
    ) -> Value | None:
        """The value at ``point``; None outside.

        ``skip``: as if the value met at that level were not there, so that only its neighbours there speak; with
        ``hidden``, as if there were none above a point this far below it. ``without``: as if that row were not there.
        """
        return self._at(_Asked(point, skip, hidden, without), 0, len(self.values), 0)

    def _at(self, asked: _Asked, low: int, high: int, level: int) -> Value | None:
        held, starts = self._node(low, high, level)
        wanted = asked.point[level]
        index = bisect_left(held, wanted - SAME)
        met = index < len(held) and held[index] <= wanted + SAME
        own = self._child(asked, starts, index, level) if met and level != asked.skip else None
        if level in self.exact or (own is not None and (own.distance == 0 or asked.skip is not None)):
            return own
        after = index + 1 if met else index
        if level == asked.skip and asked.hidden:
            index, after = bisect_left(held, wanted - asked.hidden + SAME), len(held)
        below = self._nearest(asked, starts, range(index - 1, index - 1 - NEIGHBOURS, -1), level)
        above = self._nearest(asked, starts, range(after, after + NEIGHBOURS), level)
        if below is None:
            return own
        if above is None:
            if own is not None or after < len(held) or level not in self.growing:
                return own
            return self._continued(asked, held, starts, below, level)
        (left, first), (right, second) = below, above
        if own is not None:
            if first.distance or second.distance or own.continued:
                return own  # the neighbours lack the same finer size, and would only repeat what it says
            return _together(own, self._between(held, starts, left, right, first, second, wanted, level))
        return self._between(held, starts, left, right, first, second, wanted, level)

    def _between(
        self,
        held: Sequence[float],
        starts: Sequence[int],
        left: int,
        right: int,
        first: Value,
        second: Value,
        wanted: float,
        level: int,
    ) -> Value:
        share = (wanted - held[left]) / (held[right] - held[left])
        rough, factor = self._roughness(starts, left, right, first, second, level), self.between[level]
        half = (
            factor * LEAST + min(factor, 1.0) * rough
        )  # hardly ever farther than the neighbours from each other
        nearer, gap = (first, wanted - held[left]) if 2 * share <= 1 else (second, held[right] - wanted)
        return Value(
            (1 - share) * first.value + share * second.value,
            max(first.variance, second.variance) + half**2,
            max(gap, nearer.distance),
            min(first.least, second.least),
            max(first.most, second.most),
            first.continued or second.continued,
        )

    def _roughness(
        self, starts: Sequence[int], left: int, right: int, first: Value, second: Value, level: int
    ) -> float:
        """The difference of two neighbours; of the last size, if that is more, the mean of those on either side."""
        difference = abs(first.value - second.value)
        if level < len(self.coordinates) - 1:
            return difference
        outer = []
        if left > 0:
            outer.append(abs(float(self.values[starts[left - 1]]) - first.value))
        if right < len(starts) - 2:
            outer.append(abs(float(self.values[starts[right + 1]]) - second.value))
        return max(difference, sum(outer) / len(outer)) if outer else difference

    def _continued(
        self, asked: _Asked, held: Sequence[float], starts: Sequence[int], last: tuple[int, Value], level: int
    ) -> Value | None:
        """Past the largest measured size: the last value, where values have settled and it is near."""
        index, value = last
        distance = asked.point[level] - held[index]
        earlier = bisect_left(held, held[index] - APART + SAME) - 1  # the last but one may be one row less
        before = self._nearest(asked, starts, range(earlier, earlier - NEIGHBOURS, -1), level)
        if before is None or distance > CONTINUED + SAME:
            return None
        change = abs(value.value - before[1].value)
        if change > SETTLED:
            return None
        half = self.beyond[level] * (LEAST + change)
        return Value(
            value.value, value.variance + half**2, max(distance, value.distance), value.least, math.inf, True
        )

    def _nearest(
        self, asked: _Asked, starts: Sequence[int], indices: range, level: int
    ) -> tuple[int, Value] | None:
        for index in indices:
            if 0 <= index < len(starts) - 1:
                found = self._child(asked, starts, index, level)
                if found is not None:
                    return index, found
        return None

    def _child(self, asked: _Asked, starts: Sequence[int], index: int, level: int) -> Value | None:
        low, high = starts[index], starts[index + 1]
        if level == len(asked.point) - 1:
            limit = float(self.limits[low])
            return None if low == asked.without else Value(float(self.values[low]), 0.0, 0.0, limit, limit)
        return self._at(asked, low, high, level + 1)

    def _node(self, low: int, high: int, level: int) -> Node:
        """The distinct coordinates of rows ``low`` to ``high`` at a level, and where each begins, with the end."""
        key = (low, high, level)
        found = self.nodes.get(key)
        if found is None:
            own = self.coordinates[level, low:high]
            starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
            found = (own[starts].tolist(), [*(starts + low).tolist(), high])
            self.nodes[key] = found
        return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """A point, and what to pass over; see :meth:`Lattice.at`."""

    point: Sequence[float]
    skip: int | None
    hidden: float
    without: int | None


def _together(first: Value, second: Value) -> Value:
    """Two estimates from different sides, each by the weight of its certainty."""
    one, other = 1 / (first.variance + SAME), 1 / (second.variance + SAME)
    return Value(
        (one * first.value + other * second.value) / (one + other),
        1 / (one + other),
        min(first.distance, second.distance),
        min(first.least, second.least),
        max(first.most, second.most),
    )
