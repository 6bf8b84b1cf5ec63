"""What a segment costs a worker beside its kernels and transfers: choosing it, polling, and recording its span.

The cost is measured on a loop that does those things and nothing else. :func:`bookkeeping` drives the executor's
dispatcher so; any other function that passes through a given number of segments can be put in its place.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from statistics import median

from tessera_core.devices.cpu import CpuDevice
from tessera_core.execute.arena import Inbox
from tessera_core.execute.dispatch import Dispatcher
from tessera_core.execute.segments import RouteModel, RouteProgram, Segment
from tessera_formats.errors import DeviceLostError

SegmentLoop = Callable[[int], None]
"""Passes through that many segments without kernels. Must be a module's function, as it runs in a new process."""

SEGMENTS = 2_000
"""Segments of one pass: long enough that the clock's own cost and resolution vanish."""

REPEATS = 9
"""Passes, of which the median counts."""

# Slots of the empty route, as many as a usual plan has in flight.
_LANES = 4


def bookkeeping(segments: int) -> None:
    """The executor's dispatch loop over ``segments`` empty segments, four slots in flight, nothing shipped."""
    model = _empty_route()
    dispatcher = Dispatcher(model.devices[0], [model])
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    inbox = Inbox(read, read, 0.0)
    spans: list[tuple[str, int, int, int, int, int]] = []
    now = time.monotonic_ns
    for lane in range(model.slots):
        dispatcher.start(lane, lane, [0] * (segments // model.slots), now())
    while (work := dispatcher.pick()) is not None:
        inbox.read()
        begun = now()
        ended = now()
        spans.append(("compute", work.lane, work.batch, work.iteration, begun, ended))
        dispatcher.done(work, ended)
    os.close(read)
    os.close(write)


def _empty_route() -> RouteModel:
    """One program of one segment on one device."""
    segment = Segment(
        device="worker", index=0, kernels=(0,), duration_us=0.0, receives=(), sends=(), frees=(), fed=()
    )
    program = RouteProgram(index=0, name="empty", rate=1, target=0, segments={"worker": (segment,)}, feeds=())
    return RouteModel(
        route=0, slots=_LANES, batch=1, share=1.0, devices=("worker",), programs=(program,), transfers=()
    )


def segment_overhead_us(cpu: CpuDevice, loop: SegmentLoop = bookkeeping) -> float:
    """Median time of a segment of ``loop`` on ``cpu``, in microseconds, over several passes.

    Raises :class:`DeviceLostError` where the measuring process dies.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_time, args=(far, cpu, loop), daemon=True)
    process.start()
    far.close()
    try:
        wait([near, process.sentinel])
        times: list[float] = near.recv()
    except (EOFError, OSError) as problem:
        raise DeviceLostError(
            f"the worker on {cpu.name} was lost while its overhead was measured; run tessera profile again"
        ) from problem
    finally:
        if process.is_alive():
            process.join(1)
            process.kill()
        process.join()
        near.close()
    return median(times)


def _time(connection: Connection, cpu: CpuDevice, loop: SegmentLoop) -> None:
    cpu.pin()
    loop(SEGMENTS // 10)
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter_ns()
        loop(SEGMENTS)
        times.append((time.perf_counter_ns() - begun) / 1e3 / SEGMENTS)
    connection.send(times)
