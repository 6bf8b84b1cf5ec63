"""The time of a kernel on a GPU type that it was not measured on, with its 90% interval and in words where from.

From its sizes alone: the physical model with the GPU's own coefficients, else those of its kind of memory; corrected
by what the points of the GPU's published table around say. From a time on another GPU: that time's residual, the
part of it that the model doesn't know, is carried over by the share that proved best on GPUs that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.chips import chip_of
from tessera_core.profile.model.coefficients import FittedSet, fits
from tessera_core.profile.model.demand import DEMANDS, Demand, Floats, Sizes
from tessera_core.profile.model.neighbours import Neighbours
from tessera_core.profile.model.physical import Chip, Coefficients, largest_bound, physical_time
from tessera_core.profile.model.roofline import ModelledTime, roofline_time
from tessera_core.profile.model.sizes import aligned, compute_dtype, item_bytes, sizes_of, streamed
from tessera_core.profile.model.streaming import streaming_time
from tessera_core.profile.model.tables import half_widths, table_neighbours
from tessera_core.profile.silicon.stacks import BETWEEN_STACKS, COLD_START_US
from tessera_core.profile.work import Product, Scan, Streaming, Work


@dataclass(frozen=True, slots=True)
class Unusual:
    """Products of a kind that the tables lack: by what they take longer, and how unsure that is (a logarithm)."""

    factor: float
    half_width: float
    said: str


WIDENING = 0.5
"""By how much of itself an interval grows for each factor of e in size beyond all tables: an assumption."""

SLICED, SLICED_MORE = 0.35, 0.2
"""Half an interval, as a logarithm, that a slice adds, and that each factor of e in multiprocessors adds to that.

On slices of 96 and 36 of one H200's 132 multiprocessors (fixtures/profiles) kernels scatter around any power of the
share: libraries choose grids for the whole GPU, and products' times grow by up to its power of 1.9.
"""

STREAMED_CARRIED = 0.5
"""Share of a memory-bound kernel's residual that is carried over: no published table says, so half."""

CONVOLUTION = Unusual(2.5, math.log(3.2), "of a convolution")
UNALIGNED = Unusual(2.0, math.log(2.2), "rows don't fill multiples of 16 bytes")
"""The middle and half the width of what was seen on one H200 (fixtures/profiles): convolutions took 4 and 33 times as
long as the products that they imply, unaligned products 2.7 and 3.6 times as long as aligned ones. Others may take no
longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The same kernel's time on another GPU type, measured or from a table, with its 90% interval."""

    device: ModelledDevice
    time_us: float
    low_us: float
    high_us: float
    source: str

    @property
    def half_width(self) -> float:
        """Of the logarithm's interval."""
        return math.log(self.high_us / self.low_us) / 2


def modelled_time(
    work: Work, device: ModelledDevice, references: Sequence[Reference] = (), *, tables: bool = True
) -> ModelledTime:
    """The time of ``work`` on ``device``, in microseconds.

    ``references``: known times elsewhere; the one of the GPU most like ``device`` is carried over. ``tables``: look
    at the points of the GPU's published table, where the extra ``silicon`` is installed.
    """
    classed = sizes_of(work)
    if classed is None:
        assert isinstance(work, Scan | Streaming)
        return _streamed_time(streamed(work), device, references)
    kind, sizes = classed
    if device.type.kind == "cpu":
        return _threaded_time(work, DEMANDS[kind](sizes, item_bytes(work.dtype)), device)
    demand = DEMANDS[kind](sizes, item_bytes(work.dtype))
    chip = chip_of(device, compute_dtype(work.dtype))
    best = fits().best(kind, device.type.base, chip)
    distance = best.distance({name: float(sizes[name][0]) for name in best.ranges})
    time_us = float(physical_time(demand, chip, best.fitted)[0])
    half = best.half_width * (1 + WIDENING * distance)
    bound = largest_bound(demand, chip, best.fitted)
    said = [f"model: {bound}", _origin(best)]
    around = _around(kind, device, work, best) if tables else None
    if around is not None:
        found = around.at(sizes)
        time_us *= math.exp(float(found.residual[0]))
        half = float(half_widths(found, best.scatter_factor, half)[0])
        said.append(f"corrected by {around.tree.n:,} points of its table")
    elif references:
        reference = nearest(references, device, work.dtype)
        other = float(_physical(demand, reference.device, work, best.fitted))
        residual = math.log(reference.time_us / other)
        time_us *= math.exp(best.carried * residual)
        half = math.hypot(
            best.half_width_carried * (1 + WIDENING * distance), best.carried * reference.half_width
        )
        said.append(_carried(reference, best.carried, residual))
    unusual = _unusual(work)
    if unusual is not None:
        time_us *= unusual.factor
        half = math.hypot(half, unusual.half_width)
        said.append(f"times {unusual.factor:g}: {unusual.said}")
    half = math.hypot(half, BETWEEN_STACKS[kind], _slicing(device))
    high_us = time_us * math.exp(half) + (COLD_START_US if kind == "products" else 0.0)
    return ModelledTime(time_us, time_us * math.exp(-half), high_us, "; ".join(said), bound)


def _slicing(device: ModelledDevice) -> float:
    """What a slice adds to half an interval."""
    whole = device.catalogue.type(device.type.base)
    if device.type.multiprocessors >= whole.multiprocessors:
        return 0.0
    return SLICED + SLICED_MORE * math.log(whole.multiprocessors / device.type.multiprocessors)


def _unusual(work: Work) -> Unusual | None:
    if not isinstance(work, Product):
        return None
    return CONVOLUTION if work.convolution else None if aligned(work) else UNALIGNED


def nearest(references: Sequence[Reference], device: ModelledDevice, dtype: str) -> Reference:
    """The reference on the GPU whose stated rates and L2 are most like those of ``device``."""
    wanted = chip_of(device, compute_dtype(dtype))

    def distance(reference: Reference) -> float:
        chip = chip_of(reference.device, compute_dtype(dtype))
        pairs = (
            (chip.flops_per_s, wanted.flops_per_s),
            (chip.memory_bytes_per_s, wanted.memory_bytes_per_s),
            (chip.l2_bytes, wanted.l2_bytes),
        )
        return sum(abs(math.log(ours / theirs)) for ours, theirs in pairs)

    return min(references, key=distance)


def _physical(demand: Demand, device: ModelledDevice, work: Work, fitted: Coefficients) -> float:
    return float(physical_time(demand, chip_of(device, compute_dtype(work.dtype)), fitted)[0])


def _origin(best: FittedSet) -> str:
    whose = f"of its own {' and '.join(best.tables)} table" if best.own else f"of {', '.join(best.members)}"
    return f"coefficients {whose}"


def _carried(reference: Reference, share: float, residual: float) -> str:
    return (
        f"{share:.0%} of {math.expm1(residual):+.0%} carried from {reference.device.type.name}"
        f" ({reference.source}, {reference.time_us:,.1f} us)"
    )


def _around(kind: str, device: ModelledDevice, work: Work, best: FittedSet) -> Neighbours | None:
    """The points of the table that ``best`` was calibrated with; none for slices and for other dtypes."""
    if not best.own or device.type.name != best.name or best.scatter_factor == 0:
        return None
    if work.dtype not in ("bfloat16", "float16") or getattr(work, "phase", "") == "encoder":
        return None
    return _neighbours(kind, best.name, chip_of(device, "bfloat16"))


@cache
def _neighbours(kind: str, name: str, chip: Chip) -> Neighbours | None:
    best = fits().best(kind, name, chip)

    def physical(sizes: Sizes) -> Floats:
        return physical_time(DEMANDS[kind](sizes, item_bytes("bfloat16")), chip, best.fitted)

    return table_neighbours(best, physical)


def _threaded_time(work: Work, demand: Demand, device: ModelledDevice) -> ModelledTime:
    """On a CPU thread: a plain roofline, as no table of CPUs says more."""
    return roofline_time(
        flops=float(np.min(demand.flops * demand.blocks)),
        moved_bytes=float(np.min(demand.data_bytes)),
        dtype=work.dtype,
        matrix=True,
        pointwise=False,
        ops=1,
        device=device,
    )


def _streamed_time(work: Streaming, device: ModelledDevice, references: Sequence[Reference]) -> ModelledTime:
    here = streaming_time(work, device)
    sliced = _slicing(device)
    if sliced:
        here = _widened(here, sliced)
    if not references:
        return here
    reference = nearest(references, device, work.dtype)
    there = streaming_time(work, reference.device)
    residual = math.log(reference.time_us / there.median_us)
    time_us = here.median_us * math.exp(STREAMED_CARRIED * residual)
    half = math.hypot(math.log(here.high_us / here.low_us) / 2, STREAMED_CARRIED * reference.half_width)
    said = f"{here.detail}; {_carried(reference, STREAMED_CARRIED, residual)}"
    return ModelledTime(time_us, time_us * math.exp(-half), time_us * math.exp(half), said, here.bound)


def _widened(time: ModelledTime, more: float) -> ModelledTime:
    half = math.hypot(math.log(time.high_us / time.low_us) / 2, more)
    return replace(time, low_us=time.median_us * math.exp(-half), high_us=time.median_us * math.exp(half))
