"""The dispatch rule: which segment a device runs next. Simulator and workers use this one implementation.

One :class:`Dispatcher` per device holds what the device knows. A *lane* is one slot of one route. A batch in
a lane passes through a fixed list of iterations (prefill iterations, then decode iterations); within a lane a
device runs its segments strictly in order, iteration after iteration, without waiting for other devices to end
an iteration. The next segment of a lane is *ready* when

* every transfer that it receives has arrived,
* every input that it is the first to use and that an output feeds has *landed*: once for each earlier
  iteration that feeds it,
* the regions of all transfers that it sends have been freed by their receiver since the last time.

Among ready segments the device takes the one whose iteration it entered first: *oldest iteration first*. It
enters a batch's first iteration when it is told of the batch, and any other when it has ended its part of the
one before; ties go to the lower batch number. A segment is never interrupted; its sends follow it at once, in
the plan's order, before the device takes another.

An output that feeds an input is put there (lands) as soon as it has arrived and the device has ended its own
part of the iteration that made it, so nothing still reads the input's old value. The last iteration's outputs
feed nothing and are not shipped as feeds. A received region is freed after the device's last segment of the
iteration that uses the buffer, a feed's region when it has landed.

Oldest iteration first keeps the slots in turn. Oldest *batch* first would let two or three batches starve the
others, so that a pipeline's steady state would never hold N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tessera_core.execute.segments import Feed, RouteModel, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A segment to run now, with the transfers that follow it."""

    lane: int
    batch: int
    iteration: int
    program: int
    segment: Segment
    sends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """An output of ``iteration`` (program ``program``) to be put into the input that it feeds."""

    lane: int
    iteration: int
    program: int
    feed: Feed


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an event led to, in the order in which it must be carried out.

    ``ended``: iterations of the lane's batch that the device has ended, with their program. ``landed``:
    outputs to be put into inputs. ``freed``: received regions that are free once those have been copied.
    ``complete``: the device has ended its part of the batch.
    """

    lane: int
    ended: tuple[tuple[int, int], ...] = ()
    landed: tuple[Landing, ...] = ()
    freed: tuple[int, ...] = ()
    complete: bool = False


@dataclass(slots=True)
class _Lane:
    model: RouteModel
    arrived: list[bool]
    blocked: list[bool]
    pending: list[int] = field(default_factory=list)
    batch: int = -1
    schedule: tuple[int, ...] = ()
    iteration: int = 0
    position: int = 0
    entered: float = 0.0
    busy: bool = False
    landings: dict[int, int] = field(default_factory=dict)
    landed: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)


class Dispatcher:
    """The state of one device; see the module's docstring for the rule.

    ``models``: all routes of the plan, in order; lanes number their slots in the same order. ``now`` may be
    in any unit, it is only compared.
    """

    def __init__(self, device: str, models: Sequence[RouteModel]) -> None:
        self.device = device
        self._ready: list[tuple[float, int, int]] = []
        self._segments = {
            model.route: tuple(program.segments.get(device, ()) for program in model.programs)
            for model in models
        }
        self._feeds = {
            model.route: tuple(
                tuple(feed for feed in program.feeds if feed.device == device) for program in model.programs
            )
            for model in models
        }
        self._lanes = [
            _Lane(model, [False] * len(model.transfers), [False] * len(model.transfers))
            for model in models
            for _ in range(model.slots)
        ]

    def start(self, lane: int, batch: int, schedule: Sequence[int], now: float) -> Progress:
        """A batch enters a lane; ``schedule``: index of the program of each iteration."""
        state = self._lanes[lane]
        assert state.batch < 0, f"lane {lane} is taken by batch {state.batch}"
        state.batch, state.schedule = batch, tuple(schedule)
        state.iteration = state.position = 0
        state.entered, state.busy = now, False
        state.landings, state.landed, state.expected = {}, {}, {}
        return self._settle(lane, state, now, ())

    def filled(self, lane: int, transfer: int, now: float) -> Progress:
        """A transfer to this device has arrived in its region."""
        state = self._lanes[lane]
        state.arrived[transfer] = True
        if state.model.transfers[transfer].feeds is not None:
            state.pending.append(transfer)
        if state.batch < 0:
            return Progress(lane=lane)
        return self._settle(lane, state, now, ())

    def drained(self, lane: int, transfer: int) -> None:
        """The receiver of a transfer from this device has freed its region."""
        state = self._lanes[lane]
        state.blocked[transfer] = False
        self._queue(lane, state)

    def pick(self) -> Work | None:
        """The segment to run now, or None where none is ready; end it with :meth:`done`."""
        if not self._ready:
            return None
        _, batch, lane = heappop(self._ready)
        state = self._lanes[lane]
        program = state.schedule[state.iteration]
        segment = self._segments[state.model.route][program][state.position]
        sends = self._sends(state, segment)
        for transfer in sends:
            state.blocked[transfer] = True
        return Work(
            lane=lane,
            batch=batch,
            iteration=state.iteration,
            program=program,
            segment=segment,
            sends=sends,
        )

    def done(self, work: Work, now: float) -> Progress:
        """A picked segment and its sends have ended."""
        state = self._lanes[work.lane]
        for transfer in work.segment.frees:
            state.arrived[transfer] = False
        state.position += 1
        state.busy = False
        return self._settle(work.lane, state, now, work.segment.frees)

    def _sends(self, state: _Lane, segment: Segment) -> tuple[int, ...]:
        if state.iteration < len(state.schedule) - 1:
            return segment.sends
        return tuple(t for t in segment.sends if state.model.transfers[t].used)

    def _settle(self, lane: int, state: _Lane, now: float, freed: tuple[int, ...]) -> Progress:
        """Enter further iterations, land what may land, and queue the lane's next segment."""
        model = state.model
        segments, feeds = self._segments[model.route], self._feeds[model.route]
        last = len(state.schedule) - 1
        ended: list[tuple[int, int]] = []
        landed: list[Landing] = []
        while state.iteration <= last:
            program = state.schedule[state.iteration]
            if state.position < len(segments[program]):
                break
            ended.append((state.iteration, program))
            if state.iteration < last:
                for feed in feeds[program]:
                    state.expected[feed.input] = state.expected.get(feed.input, 0) + 1
                    if feed.transfer is None:
                        landed.append(self._land(lane, state, state.iteration, program, feed))
            state.iteration += 1
            state.position = 0
            state.entered = now
        if state.pending:
            freed, landed = self._land_pending(lane, state, freed, landed)
        complete = (
            state.iteration > last
            and not state.pending
            and all(state.landed.get(name, 0) == count for name, count in state.expected.items())
        )
        if complete:
            state.batch = -1
        else:
            self._queue(lane, state)
        return Progress(lane=lane, freed=freed, ended=tuple(ended), landed=tuple(landed), complete=complete)

    def _land_pending(
        self, lane: int, state: _Lane, freed: tuple[int, ...], landed: list[Landing]
    ) -> tuple[tuple[int, ...], list[Landing]]:
        kept: list[int] = []
        last = len(state.schedule) - 1
        for transfer in state.pending:
            program = state.model.transfers[transfer].program
            count = state.landings.get(transfer, 0)
            made = [i for i, index in enumerate(state.schedule) if index == program][count]
            if made >= state.iteration:
                kept.append(transfer)
                continue
            state.landings[transfer] = count + 1
            state.arrived[transfer] = False
            freed = (*freed, transfer)
            if made < last:
                feeds = self._feeds[state.model.route][program]
                feed = next(feed for feed in feeds if feed.transfer == transfer)
                landed.append(self._land(lane, state, made, program, feed))
        state.pending = kept
        return freed, landed

    @staticmethod
    def _land(lane: int, state: _Lane, iteration: int, program: int, feed: Feed) -> Landing:
        state.landed[feed.input] = state.landed.get(feed.input, 0) + 1
        return Landing(lane=lane, iteration=iteration, program=program, feed=feed)

    def _queue(self, lane: int, state: _Lane) -> None:
        """Queue the lane's next segment if it is ready and not queued or running yet."""
        if state.busy or state.batch < 0 or state.iteration >= len(state.schedule):
            return
        segment = self._segments[state.model.route][state.schedule[state.iteration]][state.position]
        for transfer in segment.receives:
            if not state.arrived[transfer]:
                return
        for name in segment.fed:
            if state.landed.get(name, 0) != state.expected.get(name, 0):
                return
        for transfer in self._sends(state, segment):
            if state.blocked[transfer]:
                return
        state.busy = True
        heappush(self._ready, (state.entered, state.batch, lane))
