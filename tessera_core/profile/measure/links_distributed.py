"""What it costs to send bytes between two processes through ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

These transports also reach other hosts; here both ends are on this one, gloo over the loopback interface unless
``GLOO_SOCKET_IFNAME`` names another. Both ends read one monotonic clock, so a one-way transfer is timed as it is, not
as half a round trip. The receiver is waiting when the bytes leave: it is told each size beforehand.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tessera_core.devices.cpu import CpuDevice
from tessera_core.execute.process import Child, child
from tessera_core.profile.measure.links import FINE_SIZES_BYTES, Line, fit_sizes
from tessera_core.profile.times import LinkRow
from tessera_formats.errors import DeviceLostError, InputError

Backend = Literal["gloo", "nccl"]

LEAST_ROUNDS = 7
"""Messages of each size, even where the budget is over before."""

WARM_UP_ROUNDS = 2
"""Not counted: the first messages open connections and touch memory for the first time."""

TIMEOUT_S = 60
"""An end that hears nothing for so long gives up."""

# A receiver that was told the size is in its receiving call by then.
_PAUSE_S = 300e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end: a pinned CPU worker, or a GPU as PyTorch calls it (``gpu``), driven by a process of its own."""

    name: str
    device_type: str
    cpu: CpuDevice | None = None
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTimes:
    """Microseconds of single messages, shape (messages,): until the sender could go on, and until the bytes were
    there. ``late_us``: of receiving a smallest message that came long before, any shape."""

    size_bytes: npt.NDArray[np.int64]
    sending_us: npt.NDArray[np.float64]
    arrival_us: npt.NDArray[np.float64]
    late_us: npt.NDArray[np.float64]


def fit_messages(times: MessageTimes, source: str, destination: str, transport: Backend) -> LinkRow:
    """A link row: the line through the one-way times, of whose start the sender pays what its own line says.

    Receiving and sending are calls that the worker waits in, so the sender is occupied while it copies.
    """
    whole = fit_sizes(times.size_bytes, times.arrival_us)
    sending = fit_sizes(times.size_bytes, times.sending_us).line
    send_us = min(sending.intercept_us, whole.line.intercept_us)
    row = LinkRow(
        source=source,
        destination=destination,
        latency_us=whole.line.intercept_us - send_us,
        gbit_per_s=whole.line.gbit_per_s,
        send_us=send_us,
        receive_us=float(np.median(times.late_us)),
        occupies_sender=True,
        samples=whole.samples,
        residual=0.0,
        origin="measured",
        transport=transport,
    )
    fit = replace(whole, line=Line(row.transfer_us(0), whole.line.bytes_per_us))
    return replace(row, residual=fit.residual, detail=fit.describe())


def measure_messages(sender: End, receiver: End, backend: Backend, seconds: float) -> LinkRow:
    """Measure messages of 4 KiB to 16 MiB from ``sender`` to ``receiver`` for about ``seconds``, start-up aside.

    Raises :class:`InputError` where the two can't be connected, :class:`DeviceLostError` where one dies.
    """
    with tempfile.TemporaryDirectory(prefix="tessera-link-") as folder, ExitStack() as stack:
        meeting = str(Path(folder) / "meeting")
        started = [
            (end, stack.enter_context(child(_serve, end, number, backend, meeting, seconds)))
            for number, end in enumerate((sender, receiver))
        ]
        sent, (arrived, late_ns) = (_answer(end, process, backend) for end, process in started)
    stamps, ends = np.array(sent, dtype=np.int64), np.array(arrived, dtype=np.int64)
    times = MessageTimes(
        size_bytes=stamps[:, 0],
        sending_us=(stamps[:, 2] - stamps[:, 1]) / 1e3,
        arrival_us=(ends - stamps[:, 1]) / 1e3,
        late_us=np.array(late_ns, dtype=np.int64) / 1e3,
    )
    return fit_messages(times, sender.device_type, receiver.device_type, backend)


def _answer(end: End, process: Child, backend: Backend) -> Any:
    try:
        kind, content = process.connection.recv()
    except (EOFError, OSError) as problem:
        with suppress(subprocess.TimeoutExpired):
            process.process.wait(1)
        raise DeviceLostError(
            f"the process on {end.name} was lost while {backend} was measured"
            f" (exit code {process.process.returncode}); run it again"
        ) from problem
    if kind == "error":
        raise InputError(f"{backend} between two processes: {end.name} can't use it here ({content})")
    return content


def _serve(
    connection: Connection, end: End, rank: int, backend: Backend, meeting: str, seconds: float
) -> None:
    if end.cpu is not None:
        end.cpu.pin()
    import torch.distributed as distributed  # late, as the affinity must be set before

    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if end.gpu is not None:
            import torch

            torch.cuda.set_device(end.gpu)
        timeout = timedelta(seconds=TIMEOUT_S)
        distributed.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timeout
        )
        # NCCL has no tags and moves only what is on a GPU; sizes and answers take gloo.
        control = distributed.new_group(backend="gloo", timeout=timeout)
        channel = _Channel(end.gpu, control)
        found = _send(channel, seconds) if rank == 0 else _receive(channel)
        distributed.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as problem:
        connection.send(("error", str(problem).strip().partition("\n")[0]))
        return
    connection.send(("times", found))


class _Channel:
    """Rank 0's or rank 1's way to the other: messages to be timed, and numbers beside them."""

    def __init__(self, gpu: str | None, control: Any) -> None:
        import torch
        import torch.distributed as distributed

        self._distributed, self._control = distributed, control
        self._number = torch.zeros(1, dtype=torch.int64)
        self._synchronise: Callable[[], None] = (
            (lambda: None) if gpu is None else (lambda: torch.cuda.synchronize(gpu))
        )
        self.buffer = torch.randint(0, 256, (max(FINE_SIZES_BYTES),), dtype=torch.uint8, device=gpu or "cpu")

    def tell(self, number: int) -> None:
        self._number[0] = number
        self._distributed.send(self._number, self._other, group=self._control)

    def told(self) -> int:
        self._distributed.recv(self._number, self._other, group=self._control)
        return int(self._number[0])

    def send(self, size: int) -> int:
        """Send ``size`` bytes; nanoseconds on the clock when the sender could go on."""
        self._distributed.send(self.buffer[:size], self._other)
        self._synchronise()
        return time.perf_counter_ns()

    def receive(self, size: int) -> int:
        """Receive ``size`` bytes; nanoseconds on the clock when they were there."""
        self._distributed.recv(self.buffer[:size], self._other)
        self._synchronise()
        return time.perf_counter_ns()

    @property
    def _other(self) -> int:
        return 1 - int(self._distributed.get_rank())


def _send(channel: _Channel, seconds: float) -> list[tuple[int, int, int]]:
    """(size, begun, ended) of every message that counts; then one late message for every round that was."""
    stamps: list[tuple[int, int, int]] = []
    rounds, until = 0, time.perf_counter() + seconds
    while rounds < WARM_UP_ROUNDS + LEAST_ROUNDS or time.perf_counter() < until:
        for size in FINE_SIZES_BYTES:
            channel.tell(size)
            time.sleep(_PAUSE_S)
            begun = time.perf_counter_ns()
            ended = channel.send(size)
            channel.told()
            if rounds >= WARM_UP_ROUNDS:
                stamps.append((size, begun, ended))
        rounds += 1
    channel.tell(0)
    for _ in range(LEAST_ROUNDS):
        channel.send(min(FINE_SIZES_BYTES))
        channel.told()
    return stamps


def _receive(channel: _Channel) -> tuple[list[int], list[int]]:
    """When every message that counts was there, and the nanoseconds of receiving late."""
    arrived: list[int] = []
    while size := channel.told():
        arrived.append(channel.receive(size))
        channel.tell(size)
    late = []
    for _ in range(LEAST_ROUNDS):
        time.sleep(10 * _PAUSE_S)
        begun = time.perf_counter_ns()
        late.append(channel.receive(min(FINE_SIZES_BYTES)) - begun)
        channel.tell(0)
    return arrived[WARM_UP_ROUNDS * len(FINE_SIZES_BYTES) :], late
