"""What it costs to hand bytes from one CPU worker to another.

The mechanics are the executor's own (``tessera_core.execute.arena``): the sender copies into a region of shared
memory and writes *filled* into the receiver's inbox, the receiver reads in place and writes *drained* into the
sender's. Both ends read one monotonic clock, so a one-way transfer is timed as it is, not as half a round trip.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_core.devices.cpu import CpuDevice
from tessera_core.execute.arena import SPIN_US, Inbox, Kind, Message, create_arena, map_arena
from tessera_core.execute.process import Child, child
from tessera_core.profile.measure.links import SIZES_BYTES, Line, fit_sizes
from tessera_core.profile.times import LinkRow
from tessera_formats.errors import DeviceLostError

REGIONS = 4
"""Regions used in turn, one for each slot of a pipeline."""

LEAST_ROUNDS = 20
"""Messages of each size, even where the budget is over before: enough for a median."""

TRANSPORT = "shared-memory"

# Between two messages the sender stays off the link this long: an idle receiver has gone to sleep by then, so
# that waking it is part of the latency.
_PAUSE_S = 2 * SPIN_US * 1e-6

# Messages read and written to time a busy end; a few milliseconds in all.
_READS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSamples:
    """Times of single messages in microseconds, shape (messages,).

    ``copy_us``: until the bytes lie in the region. ``post_us``: of telling the receiver. ``wake_us``: from then
    until the receiver has the message. ``read_us``, ``answer_us``: what a busy end pays for reading a message that
    is there already, and for answering; any shape.
    """

    size_bytes: npt.NDArray[np.int64]
    copy_us: npt.NDArray[np.float64]
    post_us: npt.NDArray[np.float64]
    wake_us: npt.NDArray[np.float64]
    read_us: npt.NDArray[np.float64]
    answer_us: npt.NDArray[np.float64]


def fit_link(samples: LinkSamples, device_type: str) -> LinkRow:
    """A link row from single messages: the line through the median copy times, and medians of the rest.

    ``residual`` is the median relative error of predicted one-way times over the sizes.
    """
    whole = fit_sizes(samples.size_bytes, samples.copy_us + samples.post_us + samples.wake_us)
    line = fit_sizes(samples.size_bytes, samples.copy_us).line
    read_us = float(np.median(samples.read_us))
    row = LinkRow(
        source=device_type,
        destination=device_type,
        latency_us=float(np.median(samples.wake_us)),
        gbit_per_s=line.gbit_per_s,
        send_us=line.intercept_us + float(np.median(samples.post_us)) + read_us,
        receive_us=read_us + float(np.median(samples.answer_us)),
        occupies_sender=True,
        samples=len(samples.size_bytes),
        residual=0.0,
        origin="measured",
        transport=TRANSPORT,
    )
    # Of the row's own prediction, whose parts were fitted one by one.
    total = Line(row.transfer_us(0), line.bytes_per_us)
    fit = replace(whole, line=total)
    return replace(row, residual=fit.residual, detail=fit.describe())


def measure_link(sender: CpuDevice, receiver: CpuDevice, device_type: str, seconds: float) -> LinkRow:
    """Measure messages of 4 KiB to 4 MiB between two pinned processes for about ``seconds``.

    Raises :class:`DeviceLostError` where one of the processes dies.
    """
    descriptor = create_arena(REGIONS * max(SIZES_BYTES))
    inboxes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
    try:
        with ExitStack() as stack:
            ends = []
            for number, (cpu, work) in enumerate(((sender, _send), (receiver, _receive))):
                far = _FarEnd(
                    cpu=cpu, arena=descriptor, inbox=inboxes[number][0], other=inboxes[1 - number][1]
                )
                passed = (far.arena, far.inbox, far.other)
                ends.append(_NearEnd(cpu, stack.enter_context(child(work, far, seconds, pass_fds=passed))))
            sent, answered = _exchange(ends)
    finally:
        for number in (descriptor, *inboxes[0], *inboxes[1]):
            os.close(number)
    stamps, (woken, read_ns, answer_ns) = np.array(sent, dtype=np.int64), answered
    return fit_link(
        LinkSamples(
            size_bytes=stamps[:, 0],
            copy_us=(stamps[:, 2] - stamps[:, 1]) / 1e3,
            post_us=(stamps[:, 3] - stamps[:, 2]) / 1e3,
            wake_us=np.maximum(np.array(woken, dtype=np.int64) - stamps[:, 3], 0) / 1e3,
            read_us=np.array(read_ns) / 1e3,
            answer_us=np.array(answer_ns) / 1e3,
        ),
        device_type,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FarEnd:
    """What a measuring process works with: its CPU, and descriptors of arena, inbox, and the other's inbox."""

    cpu: CpuDevice
    arena: int
    inbox: int
    other: int

    def start(self, connection: Connection) -> Inbox:
        """Say ready, and wait for the other to be up as well."""
        inbox = Inbox(self.inbox, connection.fileno(), SPIN_US)
        connection.send("ready")
        connection.recv()
        return inbox

    def post(self, kind: Kind, number: int) -> None:
        """Write a message into the other's inbox."""
        os.write(self.other, Message(kind=kind, number=number).encode())


@dataclass(frozen=True, slots=True)
class _NearEnd:
    """A measuring process as its parent sees it."""

    cpu: CpuDevice
    child: Child


def _exchange(ends: Sequence[_NearEnd]) -> list[Any]:
    """Let both processes run to their end: what the sender and the receiver found."""
    _answers(ends)
    for end in reversed(ends):
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is found below
            end.child.connection.send("go")
    return _answers(ends)


def _answers(ends: Sequence[_NearEnd]) -> list[Any]:
    """The next answer of each process; raises :class:`DeviceLostError` where one is gone instead."""
    found: dict[int, Any] = {}
    while len(found) < len(ends):
        waiting = {id(e.child.connection): n for n, e in enumerate(ends) if n not in found}
        for ready in wait([ends[number].child.connection for number in waiting.values()]):
            number = waiting[id(ready)]
            try:
                found[number] = ends[number].child.connection.recv()
            except (EOFError, OSError) as problem:
                raise _lost(ends[number]) from problem
    return [found[number] for number in range(len(ends))]


def _lost(end: _NearEnd) -> DeviceLostError:
    with suppress(subprocess.TimeoutExpired):
        end.child.process.wait(1)
    return DeviceLostError(
        f"the worker on {end.cpu.name} was lost while its link was measured"
        f" (exit code {end.child.process.returncode}); run tessera profile again"
    )


def _send(connection: Connection, end: _FarEnd, seconds: float) -> None:
    end.cpu.pin()
    import torch  # late, as the affinity must be set before; the executor copies with it

    torch.set_num_threads(1)
    whole = max(SIZES_BYTES)
    memory = memoryview(map_arena(end.arena, REGIONS * whole))
    with torch.inference_mode():
        arena = torch.frombuffer(memory, dtype=torch.uint8)
        regions = [arena[number * whole : (number + 1) * whole] for number in range(REGIONS)]
        source = torch.randint(0, 256, (whole,), dtype=torch.uint8)
        inbox = end.start(connection)
        now = time.perf_counter_ns
        stamps: list[tuple[int, int, int, int]] = []
        until = time.perf_counter() + seconds
        while len(stamps) < LEAST_ROUNDS * len(SIZES_BYTES) or time.perf_counter() < until:
            for size in SIZES_BYTES:
                number = len(stamps) % REGIONS
                time.sleep(_PAUSE_S)
                source[:size].max()  # just computed: in the sender's cache, as an activation would be
                begun = now()
                regions[number][:size].copy_(source[:size])
                copied = now()
                end.post(Kind.FILLED, number)
                stamps.append((size, begun, copied, now()))
                inbox.wait()  # for the answer
    end.post(Kind.STOP, 0)
    connection.send(stamps)


def _receive(connection: Connection, end: _FarEnd, seconds: float) -> None:
    end.cpu.pin()
    inbox = end.start(connection)
    now = time.perf_counter_ns
    woken: list[int] = []
    while (message := inbox.wait()[0]).kind is Kind.FILLED:
        woken.append(now())
        end.post(Kind.DRAINED, message.number)
    connection.send((woken, *_busy_times()))


def _busy_times() -> tuple[list[int], list[int]]:
    """Nanoseconds of reading a message that is there already, and of writing one that nobody waits for."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    inbox = Inbox(read, read, 0.0)
    now = time.perf_counter_ns
    read_ns, write_ns = [], []
    for number in range(_READS):
        begun = now()
        os.write(write, Message(kind=Kind.DRAINED, number=number).encode())
        written = now()
        inbox.read()
        read_ns.append(now() - written)
        write_ns.append(written - begun)
    os.close(read)
    os.close(write)
    return read_ns, write_ns
