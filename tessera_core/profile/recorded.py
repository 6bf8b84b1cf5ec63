"""Times that somebody else's profiler recorded, as measured times of the GPU type that it ran on.

A trace that was made from a profile holds the duration of every launch. Kernels of one signature are samples of one
time; how far single samples scatter is taken from the signatures that have several.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tessera_core.devices.modelled import Z_90
from tessera_core.profile.catalogue import DeviceType
from tessera_core.profile.times import DeviceRow, TimeRow
from tessera_core.program.ir import Kernel, Trace
from tessera_formats.bundle import Bundle
from tessera_formats.deps import WHOLE

ENOUGH_SAMPLES = 8
"""Repeated samples from which a scatter is told; with fewer, the error of a modelled time stands in for it."""


def recorded_target(bundle: Bundle, device_type: str) -> str | None:
    """The target of a trace that holds recorded times of ``device_type``, if there is one."""
    for target in bundle.targets():
        if (
            f"targets/{target}/recorded" not in bundle.entries
        ):  # captures have times only where somebody recorded any
            continue
        facts = {row["name"]: row["value"] for row in bundle.table(f"targets/{target}/capture").to_pylist()}
        recorded = bundle.table(f"targets/{target}/recorded")
        if recorded.num_rows and facts.get("device_type") == device_type:
            return target
    return None


def recorded_rows(
    trace: Trace,
    bundle: Bundle,
    target: str,
    kind: DeviceType,
    kernels: Mapping[str, Kernel],
    unknown_error: float,
) -> list[TimeRow]:
    """A measured row for each of ``kernels`` (by signature) that the target has recorded times of.

    ``unknown_error``: median relative error that is assumed of times too few to tell how they scatter. The day of
    recording is not known, so that any dated measurement is newer.

    A kernel that took no time was recorded with a clock too coarse for it: that is no measurement.
    """
    durations: dict[tuple[int, int], float] = defaultdict(float)
    for row in bundle.table(f"targets/{target}/recorded").to_pylist():
        durations[row["program"], row["kernel"]] += row["duration_us"]
    samples: dict[str, list[float]] = defaultdict(list)
    for (program, number), duration in sorted(durations.items()):
        if duration <= 0:
            continue
        samples[trace.programs[program].kernels[number].signature].append(duration)
    scatter = _scatter(list(samples.values()), unknown_error)
    device = recorded_device(bundle, target, kind)
    rows = []
    for signature, kernel in kernels.items():
        found = samples.get(signature)
        if not found:
            continue
        middle = float(np.median(found))
        factor = math.exp(Z_90 * scatter / math.sqrt(len(found)))
        p10, p90 = (float(np.quantile(found, share)) for share in (0.1, 0.9))
        rows.append(
            TimeRow(
                signature=signature,
                part=WHOLE,
                device_type=kind.name,
                condition="alone",
                cache="sequence",
                median_us=middle,
                p10_us=p10,
                p90_us=p90,
                low_us=middle / factor,
                high_us=middle * factor,
                samples=len(found),
                flops=kernel.flops,
                bytes=kernel.read_bytes + kernel.written_bytes,
                dtype=kernel.dtype,
                source="measured",
                hardware=device.hardware,
                dated="",
                detail="recorded by the profiler that the trace was made from",
            )
        )
    return rows


def recorded_device(bundle: Bundle, target: str, kind: DeviceType) -> DeviceRow:
    """The device that the times were recorded on; its overhead is the catalogue's."""
    facts = {row["name"]: row["value"] for row in bundle.table(f"targets/{target}/capture").to_pylist()}
    return DeviceRow(
        device_type=kind.name,
        hardware=f"{facts.get('device') or kind.hardware}, recorded elsewhere",
        threads=0,
        overhead_us=kind.segment_overhead_us,
        date="",
        source="measured",
    )


def _scatter(samples: Sequence[Sequence[float]], unknown_error: float) -> float:
    """Standard deviation of the logarithm of a single sample, pooled over the signatures that have several."""
    squares, freedom = 0.0, 0
    for values in samples:
        logs = np.log(np.maximum(values, 1e-3))
        squares += float(((logs - logs.mean()) ** 2).sum())
        freedom += len(values) - 1
    if freedom < ENOUGH_SAMPLES:
        return math.log1p(unknown_error)
    return math.sqrt(squares / freedom)
