"""The time of a memory-bound kernel on a GPU: what any kernel takes to begin and end, then its bytes.

No published table holds such kernels (norms, activations, copies, cache writes), so the figures are from one H200
as they run in whole iterations, all data in memory at first. Pointwise kernels took as long per byte whether their data
fit L2 or not. Reductions read their input twice, for the sum and for what they make of it: the second time from L2
where all fits, otherwise from memory.
"""

from __future__ import annotations

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.roofline import ModelledTime, interval_factor, roofline_time
from tessera_core.profile.work import Streaming

POINTWISE_START_US, OTHER_START_US = 1.52, 1.94
"""Time of a kernel beside its bytes, without and with a reduction.

Least absolute logarithms over 135 kernels of six traces (fixtures/profiles, 2026-12-01: demo, gpt-oss-20b-2-layers,
llama-3-8b-4-layers, llama-tiny, mamba-codestral-7b-1-layer, stable-diffusion-3.5-medium-2-layers) on one H200, with the
two figures below. The catalogue's launch floors are those of kernels that do nothing.
"""

SORT_START_US = 8.0
"""Of a sort or a selection of the largest few; seen from 5.5 to 11.5 us in the same place."""

POINTWISE_RATE, HELD_RATE = 0.81, 0.79
"""Shares of memory's measured rate: of pointwise kernels, and of a reduction's pass over data that L2 holds."""

HELD = 0.7
"""Share of L2 up to which a reduction's data are found there the second time; seen between 35 and 50 MB of the H200's
50."""

ROW_BYTES_PER_US = 8.5e3
"""At which one block looks through a row for its largest element: 66 kB to 402 kB took 7.2 to 46.1 us."""


def streaming_time(work: Streaming, device: ModelledDevice) -> ModelledTime:
    """The time of ``work`` on ``device``, in microseconds; on a CPU its plain roofline."""
    moved = work.read_bytes + work.written_bytes
    if device.type.kind == "cpu":
        return roofline_time(
            flops=work.flops,
            moved_bytes=moved,
            dtype=work.dtype,
            matrix=False,
            pointwise=work.pointwise,
            ops=work.ops,
            device=device,
        )
    memory, compute = device.memory(), device.compute(work.dtype, matrix=False)
    bounds = (
        (_passed_bytes(work, device) / memory.per_s * 1e6, memory.log_deviation, "memory", memory.origin),
        (work.flops / compute.per_s * 1e6, compute.log_deviation, "compute", compute.origin),
        (work.row_bytes / ROW_BYTES_PER_US, 0.0, "chain", "one block a row"),
    )
    busy_us, deviation, name, origin = max(bounds, key=lambda bound: bound[0])
    start_us = POINTWISE_START_US if work.pointwise else SORT_START_US if work.sorts else OTHER_START_US
    time_us = start_us + busy_us
    large = moved >= device.catalogue.large_from_l2_multiple * device.type.l2_bytes
    error = device.catalogue.large_error if large else device.catalogue.small_error
    factor = interval_factor(error, deviation)
    bound, said = ("launch floor", "launch floor") if start_us > busy_us else (name, f"{name} ({origin})")
    return ModelledTime(time_us, time_us / factor, time_us * factor, f"model: {said}", bound)


def _passed_bytes(work: Streaming, device: ModelledDevice) -> float:
    """Bytes that take as long from memory as all passes over the data of ``work`` do."""
    moved = work.read_bytes + work.written_bytes
    if work.pointwise or moved == 0:
        return moved / POINTWISE_RATE
    held = HELD * device.type.l2_bytes
    # Beyond what L2 holds the share that stays shrinks, so that time never falls.
    cached = min(moved, held) * held / max(moved, held)
    return cached / HELD_RATE + (moved - cached) * (1 + work.read_bytes / moved)
