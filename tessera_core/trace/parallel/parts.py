"""A parallel plan for given shares: the ranges of every cut tensor that are one rank's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tessera_core.trace.parallel.plan import ParallelPlan, Split, matches
from tessera_core.trace.parallel.shares import Dimension, Shard, apportion
from tessera_formats.errors import ModelError

CORRECT = "correct its parallel_plan()"

Slice = dict[str, Any]
"""A recipe's ``slice``: ``axis``, its whole ``extent``, and ``ranges`` [first, last) of it that are the rank's."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a plan gives a rank; ``said`` names the model in messages.

    Raises :class:`InputError` (when first asked) for shares that a dimension can't be divided by, and
    :class:`ModelError` for a plan that does not fit the model.
    """

    said: str
    plan: ParallelPlan
    shard: Shard

    @cached_property
    def ranges(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By dimension, the ranks' ranges of units."""
        return {dimension.name: apportion(dimension, self.shard.shares) for dimension in self.plan.dimensions}

    def dimension(self, name: str) -> Dimension:
        """The dimension that a rule of the plan names."""
        for dimension in self.plan.dimensions:
            if dimension.name == name:
                return dimension
        raise ModelError(f"{self.said}: its parallel plan declares no dimension {name!r}; {CORRECT}")

    def counts(self, name: str) -> list[int]:
        """How much of a dimension each rank has."""
        dimension = self.dimension(name)
        each = dimension.extent // dimension.units
        return [(last - first) * each for first, last in self.ranges[name]]

    def own(self, name: str, whole: int, what: str) -> tuple[int, int]:
        """This rank's range of ``what``, of which there are ``whole`` along dimension ``name``."""
        units = self.dimension(name).units
        if whole % units:
            raise ModelError(
                f"{self.said}: {what} is {whole} long and does not divide into {units} units of {name}; {CORRECT}"
            )
        first, last = self.ranges[name][self.shard.rank]
        return first * (whole // units), last * (whole // units)

    def slices(self, splits: Iterable[Split], shapes: Mapping[str, Sequence[int]]) -> dict[str, Slice]:
        """By name, which part of each tensor that the splits name is this rank's."""
        found: dict[str, Slice] = {}
        for split in splits:
            names = [name for name in shapes if matches(split.tensor, name)]
            if not names:
                raise ModelError(
                    f"{self.said}: its parallel plan cuts {split.tensor}, which it lacks; {CORRECT}"
                )
            for name in names:
                found[name] = self._slice(name, shapes[name], split)
        return found

    def _slice(self, name: str, shape: Sequence[int], split: Split) -> Slice:
        if not -len(shape) <= split.axis < len(shape):
            raise ModelError(f"{self.said}: {name} has no axis {split.axis}; {CORRECT}")
        axis = split.axis % len(shape)
        sections = split.sections or (shape[axis],)
        if sum(sections) != shape[axis]:
            raise ModelError(
                f"{self.said}: axis {axis} of {name} is {shape[axis]} long, its sections {sum(sections)}; {CORRECT}"
            )
        ranges, start = [], 0
        for section in sections:
            first, last = self.own(split.dimension, section, f"axis {axis} of {name}")
            ranges.append([start + first, start + last])
            start += section
        return {"axis": axis, "extent": shape[axis], "ranges": ranges}


def part_shape(shape: Sequence[int], part: Slice | None) -> list[int]:
    """A tensor's shape, or that of the part which a slice names."""
    result = list(shape)
    if part is not None:
        result[part["axis"]] = sum(last - first for first, last in part["ranges"])
    return result
