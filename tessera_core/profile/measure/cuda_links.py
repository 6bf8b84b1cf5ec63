"""What copies cost on and around a CUDA device: within it, to pinned memory of the host, and back.

Timed by the device's own clock between two events. The host's time for enqueueing a copy is the sender's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from tessera_core.devices.cuda import Lane
from tessera_core.profile.measure.cuda_lab import SPACER_CYCLES
from tessera_core.profile.measure.links import Line, fit_line
from tessera_core.profile.times import LinkRow

Way = Literal["device-to-device", "device-to-host", "host-to-device"]
WAYS: tuple[Way, ...] = ("device-to-device", "device-to-host", "host-to-device")
SIZES_BYTES = tuple(4096 << (2 * step) for step in range(9))
"""4 KiB to 256 MiB, from a small activation to a prefill's cache."""
LEAST_ROUNDS = 10
TRANSPORTS: Mapping[Way, str] = {
    "device-to-device": "device-copy",
    "device-to-host": "pinned-host",
    "host-to-device": "pinned-host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Medians of one way: microseconds on the device by size, the host's for enqueueing, and the line through them.

    ``samples``: copies timed in all. ``residual``: median relative error of the line.
    """

    way: Way
    sizes_bytes: tuple[int, ...]
    times_us: tuple[float, ...]
    enqueue_us: float
    line: Line
    samples: int
    residual: float


def measure_copies(lane: Lane, seconds: float, sizes_bytes: Sequence[int] = SIZES_BYTES) -> list[Copying]:
    """Time all ways for about ``seconds`` together, sizes in turn so that drift meets all of them."""
    return [_way(lane, way, seconds / len(WAYS), sizes_bytes) for way in WAYS]


def link_row(copying: Copying, source: str, destination: str) -> LinkRow:
    """A way as a profile's link between the device types ``source`` and ``destination``."""
    return LinkRow(
        source=source,
        destination=destination,
        latency_us=copying.line.intercept_us,
        gbit_per_s=copying.line.bytes_per_us * 8e-3,
        send_us=copying.enqueue_us,
        receive_us=0.0,
        occupies_sender=False,
        samples=copying.samples,
        residual=copying.residual,
        origin="measured",
        transport=TRANSPORTS[copying.way],
    )


def _way(lane: Lane, way: Way, seconds: float, sizes_bytes: Sequence[int]) -> Copying:
    source, target = _ends(lane, way, max(sizes_bytes))
    device: dict[int, list[float]] = {size: [] for size in sizes_bytes}
    host: list[float] = []
    until = time.perf_counter() + seconds
    rounds = 0
    with torch.cuda.stream(lane.stream):
        while rounds <= LEAST_ROUNDS or time.perf_counter() < until:
            for size in sizes_bytes:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(SPACER_CYCLES)  # so that the copy is enqueued before the device comes to it
                begin.record(lane.stream)
                started = time.perf_counter()
                target[:size].copy_(source[:size], non_blocking=True)
                taken = time.perf_counter() - started
                end.record(lane.stream)
                lane.stream.synchronize()
                if rounds:  # the first one touches everything
                    device[size].append(begin.elapsed_time(end) * 1e3)
                    host.append(taken * 1e6)
            rounds += 1
    times = tuple(statistics.median(device[size]) for size in sizes_bytes)
    line = fit_line(sizes_bytes, times)
    errors = [abs(line.time_us(size) / found - 1) for size, found in zip(sizes_bytes, times)]
    return Copying(
        way=way,
        sizes_bytes=tuple(sizes_bytes),
        times_us=times,
        enqueue_us=statistics.median(host),
        line=line,
        samples=sum(len(found) for found in device.values()),
        residual=float(np.median(errors)),
    )


def _ends(lane: Lane, way: Way, size: int) -> tuple[Any, Any]:
    here = {"dtype": torch.uint8, "device": lane.device.torch_name}
    there = {"dtype": torch.uint8, "pin_memory": True}
    first, second = way.split("-to-")
    source = torch.ones(size, **(here if first == "device" else there))  # type: ignore[call-overload]
    target = torch.zeros(size, **(here if second == "device" else there))  # type: ignore[call-overload]
    return source, target
