"""Published times as points: one class of kernels on one GPU, in the model's sizes, split by whole shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.chips import chip_of
from tessera_core.profile.model.demand import DEMANDS, Demand, Floats, Sizes
from tessera_core.profile.model.physical import Chip, Coefficients, physical_time
from tessera_core.profile.model.tables import table_sizes
from tessera_core.profile.silicon.tables import SiliconPackage, read_table, sources

FRAMEWORK = "sglang"
"""The framework whose tables all six GPUs have, in their newest version each."""

GPUS = ("a100-80gb", "l40s", "h100-sxm", "h200-sxm", "rtx-pro-6000", "b200-sxm")
DTYPE, ITEM_BYTES = "bfloat16", 2

GROUPS: Mapping[str, tuple[str, ...]] = {
    "products": ("n", "k"),
    "attention-decode": ("heads", "kv_heads", "head_dim", "window"),
    "attention-prefill": ("heads", "kv_heads", "head_dim", "window"),
    "experts": ("hidden", "intermediate", "experts", "top_k"),
}
"""Sizes that make one shape: all points of a shape are held out together."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Times of one class on one GPU, in microseconds, and the keys by which GPUs are compared."""

    gpu: str
    kind: str
    sizes: Sizes
    time_us: Floats
    keys: tuple[tuple[int, ...], ...]
    table: str

    def demand(self) -> Demand:
        """What every point asks of a GPU."""
        return DEMANDS[self.kind](self.sizes, ITEM_BYTES)

    def chip(self) -> Chip:
        """The GPU as its maker states it."""
        return chip_of(ModelledDevice.of(self.gpu), DTYPE)

    def physical(self, fitted: Coefficients) -> Floats:
        """Times of the physical model."""
        return physical_time(self.demand(), self.chip(), fitted)

    def select(self, rows: Mask | npt.NDArray[np.intp]) -> Points:
        """Only these points."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Points(
            gpu=self.gpu,
            kind=self.kind,
            sizes={name: column[index] for name, column in self.sizes.items()},
            time_us=self.time_us[index],
            keys=tuple(self.keys[row] for row in index),
            table=self.table,
        )

    def shares(self) -> Floats:
        """A number in [0, 1) for each point, equal within a shape and on all GPUs: what splits are made by."""
        names = GROUPS[self.kind]
        shapes = list(zip(*(self.sizes[name].astype(int).tolist() for name in names)))
        number = {shape: _uniform(f"{self.kind}|{shape}") for shape in set(shapes)}
        return np.array([number[shape] for shape in shapes])


def _uniform(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little") / 2**48


@cache
def points(package: SiliconPackage, gpu: str, kind: str) -> Points | None:
    """All points of a class on a GPU; None where it has no table."""
    held = [source for source in sources(package, gpu, kind) if source.framework == FRAMEWORK]
    tables = [table for source in held if (table := read_table(source, DTYPE)) is not None]
    if not tables:
        return None
    table = max(tables, key=lambda table: _number(table.source.version))
    sizes = table_sizes(table)
    keys = tuple(zip(*(column.tolist() for column in table.sizes.values())))
    return Points(gpu=gpu, kind=kind, sizes=sizes, time_us=table.time_us, keys=keys, table=table.source.name)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def shared(first: Points, second: Points) -> tuple[Points, Points]:
    """The points that both GPUs have, in one order."""
    place = {key: row for row, key in enumerate(second.keys)}
    pairs = [(row, place[key]) for row, key in enumerate(first.keys) if key in place]
    mine, theirs = (np.array(column, dtype=np.intp) for column in zip(*pairs))
    return first.select(mine), second.select(theirs)
