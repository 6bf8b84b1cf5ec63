"""What a copy costs from, to and within CUDA devices, on the GPU's own clock.

Copies of a size are queued in turn over several buffers, behind a kernel that holds the stream until all are there,
so that what the host spends on launching them does not count; events before and after each tell its time. Host
memory is pinned, as the executor's is.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera_core.profile.measure.links import FINE_SIZES_BYTES, SizeFit, fit_sizes
from tessera_core.profile.times import LinkRow
from tessera_formats.errors import InputError

if TYPE_CHECKING:
    import torch

HOST = "cpu"

COPIES = 8
"""Copies of one size in a queue."""

BUFFERS = 4
"""Used in turn, one for each slot of a pipeline."""

LEAST_ROUNDS = 4
"""Queues of each size, even where the budget is over before: with :data:`COPIES`, enough for a median."""

# Clock cycles for which a kernel holds the stream: about half a millisecond, while a queue's launches take a tenth.
_HOLD_CYCLES = 1_000_000


def measure_copies(source: str, destination: str, types: tuple[str, str], seconds: float) -> LinkRow:
    """Copies of 4 KiB to 16 MiB between two devices of PyTorch (``cuda:0``, or ``cpu`` for pinned host memory).

    ``types``: of either device, for the row. Takes about ``seconds``. At least one end is a GPU; the same GPU twice
    is a copy within its memory. A GPU's copy engine does the work, so the sender is not occupied. Raises
    :class:`InputError` where there is no memory for the buffers.
    """
    import torch

    timed_on = torch.device(source if source != HOST else destination)
    try:
        pairs = [(_buffer(source), _buffer(destination)) for _ in range(BUFFERS)]
        with torch.cuda.device(timed_on), torch.cuda.stream(torch.cuda.Stream(timed_on)):
            fit = _timed(pairs, seconds)
    except torch.OutOfMemoryError as problem:
        needed = 2 * BUFFERS * max(FINE_SIZES_BYTES) >> 20
        raise InputError(
            f"copies from {source} to {destination}: there is no room for {needed} MiB of buffers;"
            " free some memory of the GPU and run it again"
        ) from problem
    return copy_row(fit, types, transport_of(source, destination, can_peer(source, destination)))


def copy_row(fit: SizeFit, types: tuple[str, str], transport: str) -> LinkRow:
    """The link that a fit of copies says."""
    return LinkRow(
        source=types[0],
        destination=types[1],
        latency_us=fit.line.intercept_us,
        gbit_per_s=fit.line.gbit_per_s,
        send_us=0.0,
        receive_us=0.0,
        occupies_sender=False,
        samples=fit.samples,
        residual=fit.residual,
        origin="measured",
        transport=transport,
        detail=fit.describe(),
    )


def transport_of(source: str, destination: str, peer: bool) -> str:
    """How bytes go between two devices; without ``peer`` access two GPUs' copies are staged through the host."""
    if source == destination:
        return "device-memory"
    return "peer-copy" if HOST not in (source, destination) and peer else "pinned-host"


def can_peer(source: str, destination: str) -> bool:
    """Whether one GPU may address the other's memory; False where one end is the host."""
    import torch

    if HOST in (source, destination) or source == destination:
        return False
    return bool(torch.cuda.can_device_access_peer(torch.device(source), torch.device(destination)))


def _buffer(place: str) -> torch.Tensor:
    import torch

    values = torch.randint(0, 256, (max(FINE_SIZES_BYTES),), dtype=torch.uint8, device=place)
    return values.pin_memory() if place == HOST else values


def _timed(pairs: list[tuple[Any, Any]], seconds: float) -> SizeFit:
    """Time queues of copies on the current stream, sizes in turn, until the budget is over."""
    import torch

    sizes: list[int] = []
    times: list[float] = []
    rounds, until = 0, time.perf_counter() + seconds
    while rounds <= LEAST_ROUNDS or time.perf_counter() < until:
        for size in FINE_SIZES_BYTES:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 1)]
            torch.cuda._sleep(_HOLD_CYCLES)
            events[0].record()
            for number, event in enumerate(events[1:]):
                start, end = pairs[number % BUFFERS]
                end[:size].copy_(start[:size], non_blocking=True)
                event.record()
            events[-1].synchronize()
            if rounds:  # the first round touches memory and opens ways between devices for the first time
                sizes += [size] * COPIES
                times += [1e3 * before.elapsed_time(after) for before, after in pairwise(events)]
        rounds += 1
    return fit_sizes(np.array(sizes, dtype=np.int64), np.array(times))
