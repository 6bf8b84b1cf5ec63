"""One worker process: one device of a run, a processor core of its own, one thread.

:mod:`tessera_core.execute.pipeline` starts a fresh interpreter on :func:`main`, sends a :class:`WorkerSpec`
over the socket given and gets back ``("ready",)``, then a :class:`BatchReport` for each batch
and at last nothing, or ``("failed", class name, message)``. What to run when is decided by
:mod:`tessera_core.execute.dispatch`; this module does it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from tessera_core.execute.arena import ArenaLayout, Inbox, Kind, Message, map_arena
from tessera_core.execute.dispatch import Dispatcher, Progress, Work
from tessera_core.execute.process import PEER_LOST
from tessera_core.execute.segments import RouteModel
from tessera_core.program.ir import Trace

if TYPE_CHECKING:
    from tessera_core.execute.lane import LaneMemory

TimedSpan = tuple[str, int, int, int, int, int, int | None, int | None, int, int, int]
"""Kind, lane, batch, program, iteration, segment, first and last kernel, bytes, start and end in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker needs. ``inboxes``: write ends by device; ``inbox``: its own read end."""

    trace: Trace
    models: tuple[RouteModel, ...]
    device: str
    cpu: int
    layout: ArenaLayout
    arena: int
    inbox: int
    inboxes: dict[str, int]
    spin_us: float
    seed: int
    weights_file: Path | None
    trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """A device's part of a finished batch.

    ``tokens``: of each iteration that makes them here, per row. ``digests``: sha256 of each final output made
    here, by name. ``spans``: all work since the last report.
    """

    lane: int
    batch: int
    tokens: dict[int, list[int]]
    digests: dict[str, str]
    spans: list[TimedSpan]


class Worker:
    """The loop of one device."""

    def __init__(self, spec: WorkerSpec, control: Connection) -> None:
        # Here and not above: the affinity must be set before PyTorch looks at the machine.
        from tessera_core.execute.lane import build_lanes

        self._spec = spec
        self._control = control
        self._arena = map_arena(spec.arena, spec.layout.bytes)
        self._inbox = Inbox(spec.inbox, control.fileno(), spec.spin_us)
        self._dispatcher = Dispatcher(spec.device, spec.models)
        self._lanes: list[LaneMemory] = build_lanes(
            spec.trace,
            spec.models,
            spec.device,
            memoryview(self._arena),
            spec.layout,
            seed=spec.seed,
            weights_file=spec.weights_file,
            trusted=spec.trusted,
        )
        self._spans: list[TimedSpan] = []

    def run(self) -> None:
        """Warm up, say ready, and work until told to stop."""
        for lane in self._lanes:
            lane.warm_up()
        self._control.send(("ready",))
        while self._handle_all(self._inbox.read()):
            work = self._dispatcher.pick()
            if work is not None:
                self._execute(work)
            elif not self._handle_all(self._inbox.wait()):
                return

    def _handle_all(self, messages: Sequence[Message]) -> bool:
        for message in messages:
            if message.kind is Kind.STOP:
                return False
            self._handle(message)
        return True

    def _handle(self, message: Message) -> None:
        lane, now = message.lane, time.monotonic_ns()
        if message.kind is Kind.FILLED:
            self._carry_out(self._dispatcher.filled(lane, message.number, now))
        elif message.kind is Kind.DRAINED:
            self._dispatcher.drained(lane, message.number)
        else:
            schedule = [p for p, count in enumerate(message.iterations) for _ in range(count)]
            last = message.first + message.count - 1
            memory = self._lanes[lane]
            memory.start(
                message.number,
                [min(message.first + row, last) for row in range(memory.model.batch)],
                schedule,
            )
            self._carry_out(self._dispatcher.start(lane, message.number, schedule, now))

    def _execute(self, work: Work) -> None:
        lane, segment = self._lanes[work.lane], work.segment
        start = time.monotonic_ns()
        for transfer in segment.receives:
            lane.receive(transfer)
        lane.compute(work.program, segment.index)
        now = time.monotonic_ns()
        kernels = segment.kernels
        self._record("compute", work, kernels[0], kernels[-1], 0, start, now)
        for transfer in work.sends:
            size, destination = lane.send(transfer)
            self._tell(destination, Kind.FILLED, work.lane, transfer)
            start, now = now, time.monotonic_ns()
            self._record("send", work, None, None, size, start, now)
        lane.collect(work.program, segment.index, work.iteration)
        self._carry_out(self._dispatcher.done(work, now))

    def _carry_out(self, progress: Progress) -> None:
        number = progress.lane
        lane = self._lanes[number]
        batch = lane.batch
        moves, freed = lane.carry_out(progress)
        for iteration, program, size, start, end in moves:
            self._spans.append(("move", number, batch, program, iteration, 0, None, None, size, start, end))
        for transfer in freed:
            self._tell(lane.source(transfer), Kind.DRAINED, number, transfer)
        if progress.complete:
            tokens, digests = lane.finish()
            spans, self._spans = self._spans, []
            self._control.send(
                BatchReport(lane=number, batch=batch, tokens=tokens, digests=digests, spans=spans)
            )

    def _tell(self, device: str, kind: Kind, lane: int, transfer: int) -> None:
        os.write(self._spec.inboxes[device], Message(kind=kind, lane=lane, number=transfer).encode())

    def _record(
        self, kind: str, work: Work, first: int | None, last: int | None, size: int, start: int, end: int
    ) -> None:
        self._spans.append(
            (
                kind,
                work.lane,
                work.batch,
                work.program,
                work.iteration,
                work.segment.index,
                first,
                last,
                size,
                start,
                end,
            )
        )


def main(arguments: Sequence[str]) -> int:
    """Serve one run over the socket whose descriptor is the only argument."""
    control = Connection(int(arguments[0]))
    try:
        spec = control.recv()
    except (EOFError, ConnectionResetError):
        return PEER_LOST
    assert isinstance(spec, WorkerSpec)
    os.sched_setaffinity(0, {spec.cpu})
    try:
        import torch

        torch.set_num_threads(1)
        with torch.inference_mode():
            Worker(spec, control).run()
    except (BrokenPipeError, ConnectionResetError):
        return PEER_LOST
    except Exception as problem:
        reason = str(problem).strip().replace("\n", " ")
        with contextlib.suppress(OSError):
            control.send(("failed", type(problem).__name__, reason))
        return 1
    return 0
