"""Kernel times for devices that are not here: a roofline with a launch floor, and an interval that owns up to
how far rooflines miss.

The time is the largest of three bounds: the launch floor, flops over the achievable rate, and bytes over the
achievable bandwidth (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009, plus the floor).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.times import Z_90

# The median of a normal distribution's absolute value, in standard deviations: turns a median error into one.
_MEDIAN_OF_ABSOLUTE = 0.6745


@dataclass(frozen=True, slots=True)
class ModelledTime:
    """A modelled time with its 90% interval, and in words what it comes from.

    ``bound``: what takes the most of it, e.g. "memory"; empty where that isn't told.
    """

    median_us: float
    low_us: float
    high_us: float
    detail: str
    bound: str = ""


def roofline_time(
    *,
    flops: float,
    moved_bytes: float,
    dtype: str,
    matrix: bool,
    pointwise: bool,
    ops: int,
    device: ModelledDevice,
) -> ModelledTime:
    """The time in microseconds of ``ops`` ops that compute ``flops`` and move ``moved_bytes``.

    ``matrix``: on matrix units. ``pointwise``: without a reduction.
    """
    compute = device.compute(dtype, matrix)
    memory = device.memory()
    bounds = (
        (device.floor_us(pointwise, ops), 0.0, "launch floor"),
        (flops / compute.per_s * 1e6, compute.log_deviation, f"compute ({compute.origin})"),
        (moved_bytes / memory.per_s * 1e6, memory.log_deviation, f"memory ({memory.origin})"),
    )
    time_us, rate_deviation, name = max(bounds, key=lambda bound: bound[0])
    large = moved_bytes >= device.catalogue.large_from_l2_multiple * device.type.l2_bytes
    error = device.catalogue.large_error if large else device.catalogue.small_error
    factor = interval_factor(error, rate_deviation)
    bound = name.partition(" (")[0]
    return ModelledTime(time_us, time_us / factor, time_us * factor, f"roofline: {name}", bound)


def interval_factor(median_error: float, rate_deviation: float) -> float:
    """By what factor the 90% interval reaches up and down.

    Errors are taken as log-normal: ``median_error`` is the median relative error of the model itself, and
    ``rate_deviation`` the standard deviation of the logarithm of the rate that was put in.
    """
    model_deviation = math.log1p(median_error) / _MEDIAN_OF_ABSOLUTE
    return math.exp(Z_90 * math.hypot(model_deviation, rate_deviation))
