"""What a model declares so that ranks can share it: which tensors are cut, and where the parts are joined.

Names are patterns of qualified names in which ``*`` stands for one part (``model.layers.*.mlp.up_proj.weight``).
A product cut by columns (its weight's output axis) makes a shard, one cut by rows (the input axis) makes a partial
sum, which an all-reduce joins (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tessera_core.trace.parallel.shares import Dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A weight or a state family of which each rank holds a part, along ``axis`` (negative: from the end).

    ``dimension``: name of what is shared. ``sections``: the axis is several tensors in a row, of so many elements
    each, and each is cut on its own; empty: one tensor.
    """

    tensor: str
    axis: int
    dimension: str
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A module whose result the ranks join: ``all_reduce`` sums it, ``all_gather`` appends along the last axis.

    ``dimension``: what the last axis of a gathered result is. The bias of a linear layer that is reduced is added
    after the sum.
    """

    module: str
    how: Literal["all_reduce", "all_gather"]
    dimension: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """An embedding whose rows are shared: each rank looks up what it holds, and the sum over ranks is the row."""

    module: str
    dimension: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A module's attribute that counts what it holds of a dimension, such as its number of heads."""

    module: str
    attribute: str
    dimension: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How ranks share a model; what a model's ``parallel_plan()`` returns.

    ``states``: splits of state families. ``first_only``: weights that belong to a partial sum and may be added
    once only, so that the first rank holds them and the others none. Whatever is not named is on every rank.
    ``notes``: lines for the trace's manifest.
    """

    dimensions: tuple[Dimension, ...]
    splits: tuple[Split, ...]
    joins: tuple[Join, ...]
    lookups: tuple[Lookup, ...] = ()
    states: tuple[Split, ...] = ()
    counts: tuple[Count, ...] = ()
    first_only: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is of ``pattern``."""
    return re.fullmatch("[^.]+".join(re.escape(part) for part in pattern.split("*")), name) is not None
