"""The time of a memory-bound kernel on a GPU: a launch, then its bytes, those that L2 still holds at L2's rate.

No published table holds such kernels (norms, activations, copies, cache writes), so the figures are the catalogue's
and two constants of ours.
"""

from __future__ import annotations

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.roofline import ModelledTime, interval_factor, roofline_time
from tessera_core.profile.work import Streaming

CACHED_RATE = 3.0
"""How many times as fast as memory L2 is; the fits to tables of products lie between 2 and 8."""

HELD = 0.5
"""Share of L2 in which a kernel finds what was just written: the other half takes what it writes itself."""


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
    held = HELD * device.type.l2_bytes
    # Up to what L2 holds the bytes are cached; beyond it the share that is shrinks, so that time never falls.
    cached = min(moved, held) * held / max(moved, held)
    bounds = (
        (
            ((moved - cached) + cached / CACHED_RATE) / memory.per_s * 1e6,
            memory.log_deviation,
            f"memory ({memory.origin})" if cached < moved else "L2",
        ),
        (work.flops / compute.per_s * 1e6, compute.log_deviation, f"compute ({compute.origin})"),
    )
    busy_us, deviation, name = max(bounds, key=lambda bound: bound[0])
    floor_us = device.floor_us(work.pointwise, work.ops)
    time_us = floor_us + busy_us
    large = moved >= device.catalogue.large_from_l2_multiple * device.type.l2_bytes
    error = device.catalogue.large_error if large else device.catalogue.small_error
    factor = interval_factor(error, deviation)
    said = f"model: {'launch floor' if floor_us > busy_us else name}"
    return ModelledTime(time_us, time_us / factor, time_us * factor, said)
