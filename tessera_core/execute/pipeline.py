"""The controller of a run on CPU workers: starts them, hands out batches, collects, and always cleans up.

While workers work, this process sleeps; it wakes for a finished batch, an arrival, or a lost worker. Each
worker is a fresh interpreter with one thread, pinned to its own core of those that this process may use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import tessera_formats.errors as errors
from tessera_core.execute.arena import (
    SPIN_US,
    ArenaLayout,
    Kind,
    Message,
    arena_layout,
    create_arena,
    create_inbox,
)
from tessera_core.execute.batches import RequestBatch
from tessera_core.execute.counting import Counted
from tessera_core.execute.process import PEER_LOST, interrupts_held, start_interpreter
from tessera_core.execute.segments import RouteModel
from tessera_core.execute.simulator import Span
from tessera_core.execute.worker import BatchReport, WorkerSpec
from tessera_core.program.ir import Trace
from tessera_formats.errors import DeviceLostError, InputError, TesseraError

STOP_SECONDS = 5.0
"""How long a worker may take to end by itself before it is killed."""

LOSS_SECONDS = 2.0
"""How long to look for the worker that was lost first once any has closed its connection."""

READY_SECONDS = 180.0
"""How long workers may take to import PyTorch, build weights and warm up."""

_TIMEVAL = struct.Struct("@ll")
"""Seconds and microseconds, as socket(7) takes them."""

_COMMAND = "import sys; from tessera_core.execute.worker import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run. ``cpus``: core of each device (by plan name)."""

    cpus: Mapping[str, int]
    seed: int
    weights_file: Path | None
    trusted: bool


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    ``tokens``: batch -> iteration -> token of each row; ``digests``: batch -> sha256 of final outputs by name.
    ``finished``: end of each finished batch in us. ``lanes``: batch -> slot. ``lost``: device and how; empty:
    none. ``error``: what a worker refused, where it is the user's to mend. Times count from the start of the run.
    """

    spans: list[Span] = field(default_factory=list)
    tokens: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    error: TesseraError | None = None


class Pipeline:
    """Workers for one plan, from start to stop; use it as a context manager."""

    def __init__(
        self, trace: Trace, models: Sequence[RouteModel], options: Options, progress: Callable[[str], None]
    ) -> None:
        self._trace, self._models, self._options = trace, tuple(models), options
        self._progress = progress
        self._devices = list(dict.fromkeys(device for model in models for device in model.devices))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._controls: dict[str, Connection] = {}
        self._inboxes: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._refusal: TesseraError | None = None
        self._lanes = [(route, slot) for route, model in enumerate(models) for slot in range(model.slots)]
        for model in models:
            if len(model.programs) > 2:
                raise InputError(
                    f"run: route {model.route} goes through {len(model.programs)} programs, at most two phases"
                    " can be run; partition with fewer programs"
                )

    def __enter__(self) -> Pipeline:
        try:
            self._start()
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._stop(STOP_SECONDS if error is None else 0.0)

    def run(self, batches: Sequence[RequestBatch]) -> Outcome:
        """Run batches to their end; a lost worker, or one that refuses to go on, ends the run early.

        The outcome then names it (and holds its own error), with the batches that had finished.
        """
        outcome = Outcome()
        origin = time.monotonic_ns()
        queues: list[deque[RequestBatch]] = [deque() for _ in self._models]
        for item in sorted(batches, key=lambda item: (item.plan.arrival_us, item.plan.batch)):
            queues[item.plan.route].append(item)
        idle = [
            deque(lane for lane, (owner, _) in enumerate(self._lanes) if owner == route)
            for route in range(len(self._models))
        ]
        counted = Counted(len(batches), self._progress)
        open_devices: dict[int, set[str]] = {}
        by_connection = {id(control): device for device, control in self._controls.items()}
        while any(queues) or open_devices:
            elapsed = (time.monotonic_ns() - origin) / 1000
            self._admit(queues, idle, open_devices, outcome, elapsed)
            timeout = self._next_arrival(queues, idle, elapsed)
            lost = False
            for ready in wait(list(self._controls.values()), timeout):
                assert isinstance(ready, Connection)
                device = by_connection[id(ready)]
                report = self._receive(device)
                if report is None:
                    lost = True
                    continue
                self._take(device, report, outcome, origin)
                open_devices[report.batch].discard(device)
                if not open_devices[report.batch]:
                    del open_devices[report.batch]
                    outcome.finished[report.batch] = (time.monotonic_ns() - origin) / 1000
                    idle[self._lanes[report.lane][0]].append(report.lane)
                    counted.one_more()
            if lost:
                outcome.lost, outcome.error = self._loss(), self._refusal
                return outcome
        return outcome

    def _admit(
        self,
        queues: Sequence[deque[RequestBatch]],
        idle: Sequence[deque[int]],
        open_devices: dict[int, set[str]],
        outcome: Outcome,
        elapsed: float,
    ) -> None:
        for route, queue in enumerate(queues):
            while queue and idle[route] and queue[0].plan.arrival_us <= elapsed:
                item, lane = queue.popleft(), idle[route].popleft()
                outcome.lanes[item.plan.batch] = self._lanes[lane][1]
                open_devices[item.plan.batch] = set(self._models[route].devices)
                counts = (*item.plan.iterations, 0)
                message = Message(
                    kind=Kind.START,
                    lane=lane,
                    number=item.plan.batch,
                    first=item.first,
                    count=item.count,
                    iterations=(counts[0], counts[1]),
                ).encode()
                for device in self._models[route].devices:
                    os.write(self._inboxes[device], message)

    @staticmethod
    def _next_arrival(
        queues: Sequence[deque[RequestBatch]], idle: Sequence[deque[int]], elapsed: float
    ) -> float | None:
        """Seconds to sleep at most: until a batch arrives whose route has a free slot."""
        arrivals = [q[0].plan.arrival_us for q, free in zip(queues, idle, strict=True) if q and free]
        return max(0.0, min(arrivals) - elapsed) / 1e6 if arrivals else None

    def _take(self, device: str, report: BatchReport, outcome: Outcome, origin: int) -> None:
        outcome.tokens.setdefault(report.batch, {}).update(report.tokens)
        outcome.digests.setdefault(report.batch, {}).update(report.digests)
        for kind, lane, batch, program, iteration, segment, first, last, size, start, end in report.spans:
            route, slot = self._lanes[lane]
            model = self._models[route]
            outcome.spans.append(
                Span(
                    device=device,
                    kind=kind,
                    route=model.route,
                    slot=slot,
                    batch=batch,
                    program=model.programs[program].name,
                    iteration=iteration,
                    segment=segment,
                    first_kernel=first,
                    last_kernel=last,
                    bytes=size,
                    start_us=(start - origin) / 1000,
                    end_us=(end - origin) / 1000,
                )
            )

    def _receive(self, device: str) -> BatchReport | None:
        """The next report of a worker; None where it is gone."""
        try:
            found = self._controls[device].recv()
        except (EOFError, ConnectionResetError):
            return None
        if isinstance(found, BatchReport):
            return found
        _, name, reason = found
        self._failures[device] = f"failed: {name}: {reason}"
        self._refusal = self._refusal or _own_error(name, reason)
        return None

    def _loss(self) -> str:
        """Which worker was lost first, and how; the others then stop because they miss it."""
        limit = time.monotonic() + LOSS_SECONDS
        while time.monotonic() < limit:
            for device, process in self._processes.items():
                code = process.poll()
                if device in self._failures:
                    return f"{device}: its worker {self._failures[device]}"
                if code is not None and code != PEER_LOST:
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    return f"{device}: its worker {how}"
            time.sleep(0.005)
        return f"{', '.join(self._devices)}: a worker closed its connection"

    def _start(self) -> None:
        layout = arena_layout(self._trace, self._models)
        arena = create_arena(layout.bytes)
        reads: dict[str, int] = {}
        try:
            for device in self._devices:
                reads[device], self._inboxes[device] = create_inbox(self._models, device)
            for device in self._devices:
                self._launch(device, reads[device], arena)
            # Only now, because a specification may be larger than what a socket takes unread.
            for device in self._devices:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is found below
                    try:
                        self._controls[device].send(self._specification(device, reads[device], layout, arena))
                    except BlockingIOError:
                        raise _not_ready(device) from None
        finally:
            os.close(arena)
            for descriptor in reads.values():
                os.close(descriptor)
        limit = time.monotonic() + READY_SECONDS
        for device, control in self._controls.items():
            if not control.poll(max(0.0, limit - time.monotonic())):
                raise _not_ready(device)
            try:
                found = control.recv()
            except (EOFError, ConnectionResetError):
                raise DeviceLostError(f"run: {self._loss()} before it was ready; run again") from None
            if found[0] == "failed":
                raise _own_error(found[1], found[2]) or DeviceLostError(
                    f"run: the worker of {device} failed: {found[1]}: {found[2]}; run again"
                )

    def _launch(self, device: str, inbox: int, arena: int) -> None:
        with interrupts_held():
            started = start_interpreter(_COMMAND, (arena, inbox, *self._inboxes.values()))
            self._processes[device], self._controls[device] = started.process, started.connection
        # A worker that does not read must not hold the run up for ever: a send then fails.
        limit = _TIMEVAL.pack(int(READY_SECONDS), int(READY_SECONDS % 1 * 1e6))
        with socket.socket(fileno=os.dup(started.connection.fileno())) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _specification(self, device: str, inbox: int, layout: ArenaLayout, arena: int) -> WorkerSpec:
        return WorkerSpec(
            trace=self._trace,
            models=self._models,
            device=device,
            cpu=self._options.cpus[device],
            layout=layout,
            arena=arena,
            inbox=inbox,
            inboxes=dict(self._inboxes),
            spin_us=SPIN_US if len(os.sched_getaffinity(0)) >= len(self._devices) else 0.0,
            seed=self._options.seed,
            weights_file=self._options.weights_file,
            trusted=self._options.trusted,
        )

    def _stop(self, seconds: float) -> None:
        """End all workers; ``seconds``: how long they may take, after which they are killed."""
        for descriptor in self._inboxes.values():
            with contextlib.suppress(OSError):
                os.write(descriptor, Message(kind=Kind.STOP).encode())
            os.close(descriptor)
        self._inboxes.clear()
        for control in self._controls.values():
            control.close()
        limit = time.monotonic() + seconds
        for process in self._processes.values():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _own_error(name: str, reason: str) -> TesseraError | None:
    """A worker's error as itself where it is one that the user can mend."""
    kind = getattr(errors, name, None)
    return kind(reason) if isinstance(kind, type) and issubclass(kind, TesseraError) else None


def _not_ready(device: str) -> DeviceLostError:
    return DeviceLostError(
        f"run: the worker of {device} was not ready within {READY_SECONDS:.0f} s; "
        "see whether the machine is overloaded, then run again"
    )
