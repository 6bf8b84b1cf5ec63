"""Simulation of a changing load over several plans that share the devices.

Requests queue in order of arrival. Whenever a slot of the plan in force is free and a request waits, a batch of
up to the route's batch size starts there, full or not (an iteration costs the same either way); it stays on that
plan to its end. Among free slots, the route with the fewest busy slots for its share is taken. Batches of all
plans contend for devices and links under the workers' own dispatch rule (:mod:`tessera_core.execute.dispatch`):
a device computes one segment at a time, sends follow it and take ``sender_us`` of the sender, a directed link
carries one transfer at a time for ``link_us``, and it arrives ``latency_us`` later.

At equal times work ends first, then a window, then requests arrive, then slots are filled. Deterministic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from tessera_core.adapt.arrivals import Arrival
from tessera_core.adapt.controller import Controller, Decision
from tessera_core.adapt.model import PlanModel
from tessera_core.adapt.monitor import Window
from tessera_core.execute.dispatch import Dispatcher, Progress, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request that has ended: its plan (index) and times."""

    arrival: Arrival
    plan: int
    start_us: float
    first_token_us: float
    end_us: float

    @property
    def latency_us(self) -> float:
        """From arrival to end."""
        return self.end_us - self.arrival.arrival_us


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation gives: windows and decisions in order of time, requests in order of arrival."""

    windows: tuple[Window, ...]
    decisions: tuple[Decision, ...]
    served: tuple[Served, ...]


class _Event(NamedTuple):
    """``rank`` orders what happens at one time: work, then the end of a window, then an arrival."""

    time_us: float
    rank: int
    number: int
    lane: int = 0
    transfer: int = 0
    work: Work | None = None
    arrival: Arrival | None = None


_WORK, _WINDOW, _ARRIVAL = range(3)


@dataclass(slots=True)
class _Batch:
    number: int
    requests: tuple[Arrival, ...]
    start_us: float
    schedule: tuple[int, ...]
    open_devices: set[str]
    ended: dict[int, int]
    first_token_us: dict[int, float]


class _Simulation:
    def __init__(
        self, plans: Sequence[PlanModel], arrivals: Sequence[Arrival], window_us: float, first: int,
        controller: Controller | None,
    ) -> None:  # fmt: skip
        self.plans, self.arrivals, self.window_us, self.controller = plans, arrivals, window_us, controller
        self.in_force = first
        self.owners = [
            (plan, route) for plan, model in enumerate(plans) for route in range(len(model.routes))
        ]
        self.routes = [plans[plan].routes[route] for plan, route in self.owners]
        self.models = [replace(route.model, route=index) for index, route in enumerate(self.routes)]
        self.lanes = [route for route, model in enumerate(self.models) for _ in range(model.slots)]
        self.devices = list(dict.fromkeys(device for model in self.models for device in model.devices))
        self.dispatchers = {device: Dispatcher(device, self.models) for device in self.devices}
        self.free = dict.fromkeys(self.devices, True)
        self.link_free: dict[tuple[str, str], float] = {}
        self.running: dict[int, _Batch] = {}
        self.queue: deque[Arrival] = deque()
        self.events: list[_Event] = []
        self.count = self.batches = 0
        self.served: list[Served] = []
        self.windows: list[Window] = []
        self.decisions: list[Decision] = []
        self.offered: list[Arrival] = []
        self.arrived = 0

    def run(self) -> Outcome:
        for arrival in self.arrivals:
            self.at(arrival.arrival_us, _ARRIVAL, arrival=arrival)
        self.at(self.window_us, _WINDOW)
        while self.events:
            event = heappop(self.events)
            now = event.time_us
            if event.rank == _ARRIVAL:
                assert event.arrival is not None
                self.queue.append(event.arrival)
                self.offered.append(event.arrival)
                self.arrived += 1
            elif event.rank == _WINDOW:
                self.end_window(now)
            elif event.work is not None:
                self.free[event.work.segment.device] = True
                device = event.work.segment.device
                self.settle(device, self.dispatchers[device].done(event.work, now), now)
            else:
                device = self.models[self.lanes[event.lane]].transfers[event.transfer].transfer.destination
                self.settle(device, self.dispatchers[device].filled(event.lane, event.transfer, now), now)
            if not self.events or self.events[0].time_us > now:
                self.admit(now)
                self.dispatch(now)
        served = sorted(self.served, key=lambda item: item.arrival.request)
        return Outcome(tuple(self.windows), tuple(self.decisions), tuple(served))

    def at(
        self, time: float, rank: int, lane: int = 0, transfer: int = 0,
        work: Work | None = None, arrival: Arrival | None = None,
    ) -> None:  # fmt: skip
        heappush(self.events, _Event(time, rank, self.count, lane, transfer, work, arrival))
        self.count += 1

    def admit(self, now: float) -> None:
        """Fill free slots of the plan in force from the queue."""
        while self.queue and (lane := self.free_lane()) is not None:
            route = self.routes[self.lanes[lane]]
            requests = tuple(self.queue.popleft() for _ in range(min(route.batch, len(self.queue))))
            counts = route.iterations(max(request.output_tokens for request in requests))
            schedule = tuple(program for program, count in enumerate(counts) for _ in range(count))
            self.running[lane] = _Batch(
                self.batches, requests, now, schedule, set(route.model.devices), {}, {}
            )
            for device in route.model.devices:
                self.settle(device, self.dispatchers[device].start(lane, self.batches, schedule, now), now)
            self.batches += 1

    def free_lane(self) -> int | None:
        """A free slot of the plan in force, on the route that is least busy for its share."""
        best: tuple[float, int] | None = None
        for lane, route in enumerate(self.lanes):
            if self.owners[route][0] == self.in_force and lane not in self.running:
                busy = sum(self.lanes[other] == route for other in self.running)
                load = (busy + 1) / max(self.models[route].share, 1e-9)
                if best is None or (load, lane) < best:
                    best = (load, lane)
        return None if best is None else best[1]

    def settle(self, device: str, progress: Progress, now: float) -> None:
        lane = progress.lane
        model = self.models[self.lanes[lane]]
        for transfer in progress.freed:
            self.dispatchers[model.transfers[transfer].transfer.source].drained(lane, transfer)
        for iteration, _ in progress.ended:
            batch = self.running[lane]
            batch.ended[iteration] = batch.ended.get(iteration, 0) + 1
            if batch.ended[iteration] == len(model.devices):
                self.end_iteration(lane, batch, iteration, now)
        if progress.complete:
            self.running[lane].open_devices.discard(device)
            if not self.running[lane].open_devices:
                del self.running[lane]

    def end_iteration(self, lane: int, batch: _Batch, iteration: int, now: float) -> None:
        """Tokens appear when every device has ended an iteration."""
        route = self.routes[self.lanes[lane]]
        program = batch.schedule[iteration]
        before = sum(earlier == program for earlier in batch.schedule[:iteration])
        last = len(route.programs) - 1
        if program < last - 1:
            return
        if program < last:
            size = route.programs[program].batch
            members = range(before * size, min((before + 1) * size, len(batch.requests)))
            token = 1
        else:
            members = range(len(batch.requests))
            token = before + (2 if last else 1)
        for member in members:
            request = batch.requests[member]
            if token == 1:
                batch.first_token_us[member] = now
            if token == request.output_tokens:
                self.served.append(
                    Served(
                        arrival=request,
                        plan=self.owners[self.lanes[lane]][0],
                        start_us=batch.start_us,
                        first_token_us=batch.first_token_us[member],
                        end_us=now,
                    )
                )

    def dispatch(self, now: float) -> None:
        for device in self.devices:
            work = self.dispatchers[device].pick() if self.free[device] else None
            if work is None:
                continue
            self.free[device] = False
            end = now + work.segment.duration_us
            for index in work.sends:
                move = self.models[self.lanes[work.lane]].transfers[index]
                end += move.sender_us
                left = end
                if move.link_us:
                    pair = (device, move.transfer.destination)
                    left = max(end, self.link_free.get(pair, 0.0)) + move.link_us
                    self.link_free[pair] = left
                self.at(left + move.latency_us, _WORK, lane=work.lane, transfer=index)
            self.at(end, _WORK, work=work)

    def end_window(self, now: float) -> None:
        ended = self.served[sum(item.completions for item in self.windows) :]
        running = self.arrived - len(self.served) - len(self.queue)
        window = Window(
            index=len(self.windows),
            start_us=self.windows[-1].end_us if self.windows else 0.0,
            end_us=now,
            plan=self.in_force,
            offered=tuple(self.offered),
            arrivals=self.arrived - sum(item.arrivals for item in self.windows),
            completions=len(ended),
            queued=len(self.queue),
            running=running,
            mean_latency_us=sum(item.latency_us for item in ended) / len(ended) if ended else None,
        )
        self.windows.append(window)
        self.offered = list(self.queue)
        decision = self.controller.decide(window) if self.controller else None
        if decision is not None:
            self.decisions.append(decision)
            self.in_force = decision.after
        if len(self.served) < len(self.arrivals):
            self.at((len(self.windows) + 1) * self.window_us, _WINDOW)


def simulate(
    plans: Sequence[PlanModel],
    arrivals: Sequence[Arrival],
    *,
    window_us: float,
    first: int,
    controller: Controller | None = None,
) -> Outcome:
    """Serve ``arrivals`` beginning on plan ``first``; without a controller that plan stays in force."""
    return _Simulation(plans, arrivals, window_us, first, controller).run()
