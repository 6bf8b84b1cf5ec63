"""Discrete-event simulation of routes on devices and links, under the dispatch rule of the workers.

The rule is :mod:`tessera_core.execute.dispatch`'s, word for word, because both run that module. What is
simulated around it: a device computes one segment at a time for its ``duration_us``; its sends follow, each
taking the sender for ``sender_us``; a transfer then takes its directed link (source, destination) for
``link_us``, first come first served, and arrives ``latency_us`` after it left the link. Landing outputs in
inputs, moving state from prefill to decode and telling devices of batches take no time. A slot takes its
route's next batch, in order of arrival, when every device has ended the last one.

It knows neither PyTorch nor processes, and is deterministic.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from tessera_core.execute.dispatch import Dispatcher, Progress, Work
from tessera_core.execute.segments import RouteModel

STEADY_ROUNDS = 24
"""Iterations per slot that :func:`steady_interval` simulates; the first third fills the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A batch to be run: its route (index into the models), arrival, and iterations of each program."""

    batch: int
    route: int
    arrival_us: float
    iterations: tuple[int, ...]

    @property
    def schedule(self) -> tuple[int, ...]:
        """The program of each iteration, in order."""
        return tuple(program for program, count in enumerate(self.iterations) for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work on a device; the columns of the run artifact's ``spans``."""

    device: str
    kind: str
    route: int
    slot: int
    batch: int
    program: str
    iteration: int
    segment: int
    first_kernel: int | None
    last_kernel: int | None
    bytes: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Completion:
    """An iteration of a batch has ended on every device."""

    route: int
    slot: int
    batch: int
    iteration: int
    program: str
    start_us: float
    end_us: float


class _Simulation:
    def __init__(
        self, models: Sequence[RouteModel], batches: Sequence[BatchPlan], ended: Callable[[], None]
    ) -> None:
        self.models = models
        self.ended = ended
        self.lanes = [(index, slot) for index, model in enumerate(models) for slot in range(model.slots)]
        self.devices = list(dict.fromkeys(device for model in models for device in model.devices))
        self.dispatchers = {device: Dispatcher(device, models) for device in self.devices}
        self.free = dict.fromkeys(self.devices, True)
        self.link_free: dict[tuple[str, str], float] = {}
        self.queues: list[deque[BatchPlan]] = [deque() for _ in models]
        self.idle: list[deque[int]] = [
            deque(lane for lane, (route, _) in enumerate(self.lanes) if route == index)
            for index in range(len(models))
        ]
        self.running: dict[int, tuple[BatchPlan, set[str]]] = {}
        self.events: list[tuple[float, int, tuple[str, int, int, object]]] = []
        self.count = 0
        self.spans: list[Span] = []
        for batch in sorted(batches, key=lambda item: (item.arrival_us, item.batch)):
            self.at(batch.arrival_us, ("arrive", 0, 0, batch))

    def at(self, time: float, event: tuple[str, int, int, object]) -> None:
        heappush(self.events, (time, self.count, event))
        self.count += 1

    def run(self) -> list[Span]:
        while self.events:
            now, _, (kind, lane, transfer, value) = heappop(self.events)
            if kind == "arrive":
                assert isinstance(value, BatchPlan)
                self.queues[value.route].append(value)
                self.admit(value.route, now)
            elif kind == "filled":
                model, _ = self.lanes[lane]
                device = self.models[model].transfers[transfer].transfer.destination
                self.settle(device, self.dispatchers[device].filled(lane, transfer, now), now)
            else:
                assert isinstance(value, Work)
                device = value.segment.device
                self.free[device] = True
                self.settle(device, self.dispatchers[device].done(value, now), now)
            if not self.events or self.events[0][0] > now:
                self.dispatch(now)
        return self.spans

    def admit(self, route: int, now: float) -> None:
        while self.queues[route] and self.idle[route]:
            batch = self.queues[route].popleft()
            lane = self.idle[route].popleft()
            devices = self.models[route].devices
            self.running[lane] = (batch, set(devices))
            for device in devices:
                dispatcher = self.dispatchers[device]
                self.settle(device, dispatcher.start(lane, batch.batch, batch.schedule, now), now)

    def settle(self, device: str, progress: Progress, now: float) -> None:
        lane = progress.lane
        route, _ = self.lanes[lane]
        for transfer in progress.freed:
            source = self.models[route].transfers[transfer].transfer.source
            self.dispatchers[source].drained(lane, transfer)
        if progress.complete:
            _, open_devices = self.running[lane]
            open_devices.discard(device)
            if not open_devices:
                del self.running[lane]
                self.ended()
                self.idle[route].append(lane)
                self.admit(route, now)

    def dispatch(self, now: float) -> None:
        for device in self.devices:
            if self.free[device]:
                work = self.dispatchers[device].pick()
                if work is not None:
                    self.execute(device, work, now)

    def execute(self, device: str, work: Work, now: float) -> None:
        self.free[device] = False
        route, _ = self.lanes[work.lane]
        kernels = work.segment.kernels
        end = now + work.segment.duration_us
        self.record(device, "compute", work, kernels[0], kernels[-1], 0, now, end)
        for index in work.sends:
            move = self.models[route].transfers[index]
            start, end = end, end + move.sender_us
            pair = (device, move.transfer.destination)
            left = end
            if move.link_us:
                left = max(end, self.link_free.get(pair, 0.0)) + move.link_us
                self.link_free[pair] = left
            self.record(device, "send", work, None, None, move.transfer.bytes, start, left)
            self.at(left + move.latency_us, ("filled", work.lane, index, None))
        self.at(end, ("done", work.lane, 0, work))

    def record(
        self,
        device: str,
        kind: str,
        work: Work,
        first: int | None,
        last: int | None,
        size: int,
        start: float,
        end: float,
    ) -> None:
        route, slot = self.lanes[work.lane]
        model = self.models[route]
        self.spans.append(
            Span(
                device=device,
                kind=kind,
                route=model.route,
                slot=slot,
                batch=work.batch,
                program=model.programs[work.program].name,
                iteration=work.iteration,
                segment=work.segment.index,
                first_kernel=first,
                last_kernel=last,
                bytes=size,
                start_us=start,
                end_us=end,
            )
        )


def simulate(
    models: Sequence[RouteModel], batches: Sequence[BatchPlan], ended: Callable[[], None] = lambda: None
) -> list[Span]:
    """Run batches over routes; the spans in order of their start on each device, times in microseconds.

    ``ended`` is called whenever a batch has ended.
    """
    return _Simulation(models, batches, ended).run()


def completions(spans: Sequence[Span]) -> list[Completion]:
    """When each iteration of each batch began and ended over all devices, in order of end."""
    bounds: dict[tuple[int, int, int, int, str], tuple[float, float]] = {}
    for span in spans:
        if span.kind == "compute":
            key = (span.route, span.slot, span.batch, span.iteration, span.program)
            start, end = bounds.get(key, (span.start_us, span.end_us))
            bounds[key] = (min(start, span.start_us), max(end, span.end_us))
    found = [Completion(*key, start, end) for key, (start, end) in bounds.items()]
    return sorted(found, key=lambda item: (item.end_us, item.batch, item.iteration))


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady interval and the number of intervals that it is the mean of (0: there was none)."""

    interval_us: float
    iterations: int


def steady(ended: Sequence[Completion], program: str, slots: int) -> Steady:
    """Mean time between completions of ``program`` while all ``slots`` of one route are in it.

    A slot is in a program from the start of its batch's first iteration of it to the end of the last.
    ``ended``: completions of one route. A window counts from its first completion, for whole rounds of the slots.
    """
    phases: dict[int, tuple[float, float]] = {}
    times: list[float] = []
    for item in ended:
        if item.program == program:
            start, end = phases.get(item.batch, (item.start_us, item.end_us))
            phases[item.batch] = (min(start, item.start_us), max(end, item.end_us))
            times.append(item.end_us)
    times.sort()
    edges = sorted([(start, 1) for start, _ in phases.values()] + [(end, -1) for _, end in phases.values()])
    total, count, inside = 0.0, 0, 0
    begun: float | None = None
    for moment, change in edges:
        if begun is not None:
            first, end = bisect_left(times, begun), bisect_right(times, moment)
            if end - first > 1:
                number = _rounds(end - first - 1, slots)
                total += times[first + number] - times[first]
                count += number
        inside += change
        begun = moment if inside >= slots else None
    return Steady(total / count if count else 0.0, count)


def steady_interval(model: RouteModel, program: str, slots: int | None = None) -> float:
    """Microseconds between completions of ``program`` in a full pipeline of ``slots`` (None: the route's own).

    Every slot repeats the program without end, its outputs feeding its own inputs; the mean is taken after
    the pipeline has filled.
    """
    index = next(i for i, item in enumerate(model.programs) if item.name == program)
    count = model.slots if slots is None else slots
    alone = RouteModel(
        route=model.route,
        slots=count,
        batch=model.batch,
        share=model.share,
        devices=model.devices,
        programs=model.programs,
        transfers=model.transfers,
    )
    rounds = tuple(STEADY_ROUNDS if i == index else 0 for i in range(len(model.programs)))
    batches = [BatchPlan(batch=b, route=0, arrival_us=0.0, iterations=rounds) for b in range(count)]
    ends = [item.end_us for item in completions(simulate([alone], batches))]
    first = len(ends) // 3
    number = _rounds(len(ends) - 1 - len(ends) // 8 - first, count)
    return (ends[first + number] - ends[first]) / number


def _rounds(intervals: int, slots: int) -> int:
    """As many of ``intervals`` as make whole rounds of all slots, whose completions may come in bursts."""
    return intervals // slots * slots or intervals
