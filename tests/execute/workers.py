"""The workers of a run in one process, taking turns as the test says."""

from collections import deque
from collections.abc import Callable, Sequence

from tessera_core.execute.arena import arena_layout
from tessera_core.execute.dispatch import Dispatcher, Progress
from tessera_core.execute.lane import LaneMemory, build_lanes
from tessera_core.execute.segments import RouteModel
from tessera_core.program.ir import Trace

Choose = Callable[[Sequence[str]], str]


class Workers:
    """Devices with their dispatchers and memories. ``choose``: which device acts next, of those that can.

    ``tokens`` and ``digests`` hold what each finished batch gave, by batch. Requests of batch b are
    b * size, b * size + 1, ...
    """

    def __init__(self, trace: Trace, model: RouteModel, choose: Choose) -> None:
        self.model, self.choose = model, choose
        layout = arena_layout(trace, [model])
        arena = memoryview(bytearray(layout.bytes))
        self.dispatchers = {device: Dispatcher(device, [model]) for device in model.devices}
        self.lanes: dict[str, list[LaneMemory]] = {
            device: build_lanes(
                trace, [model], device, arena, layout, seed=0, weights_file=None, trusted=False
            )
            for device in model.devices
        }
        for lanes in self.lanes.values():
            for lane in lanes:
                lane.warm_up()
        self.messages: dict[str, deque[tuple[str, int, int]]] = {d: deque() for d in model.devices}
        self.open: dict[int, set[str]] = {}
        self.tokens: dict[int, dict[int, list[int]]] = {}
        self.digests: dict[int, dict[str, str]] = {}
        self.todo: deque[int] = deque()
        self.clock = 0

    def run(self, batches: int, schedule: Sequence[int]) -> None:
        """Run batches to their end, as many at once as there are slots."""
        self.todo.extend(range(batches))
        for lane in range(self.model.slots):
            self.begin(lane, schedule)
        while self.open:
            able = [d for d in self.model.devices if self.messages[d] or self.dispatchers[d]._ready]
            assert able, "deadlock"
            self.step(self.choose(able) if len(able) > 1 else able[0])
            for lane in [lane for lane, devices in self.open.items() if not devices]:
                del self.open[lane]
                self.begin(lane, schedule)

    def begin(self, lane: int, schedule: Sequence[int]) -> None:
        if not self.todo:
            return
        batch, size = self.todo.popleft(), self.model.batch
        self.open[lane] = set(self.model.devices)
        self.tokens[batch], self.digests[batch] = {}, {}
        for device in self.model.devices:
            self.lanes[device][lane].start(batch, range(batch * size, (batch + 1) * size), schedule)
            self.carry_out(device, self.dispatchers[device].start(lane, batch, schedule, self.clock))

    def step(self, device: str) -> None:
        """Let a device take its next message, or run its next segment."""
        self.clock += 1
        dispatcher, lanes = self.dispatchers[device], self.lanes[device]
        if self.messages[device]:
            kind, lane, transfer = self.messages[device].popleft()
            if kind == "filled":
                self.carry_out(device, dispatcher.filled(lane, transfer, self.clock))
            else:
                dispatcher.drained(lane, transfer)
            return
        work = dispatcher.pick()
        assert work is not None
        memory = lanes[work.lane]
        for transfer in work.segment.receives:
            memory.receive(transfer)
        memory.compute(work.program, work.segment.index)
        for transfer in work.sends:
            _, destination = memory.send(transfer)
            self.messages[destination].append(("filled", work.lane, transfer))
        memory.collect(work.program, work.segment.index, work.iteration)
        self.carry_out(device, dispatcher.done(work, self.clock))

    def carry_out(self, device: str, progress: Progress) -> None:
        lane = self.lanes[device][progress.lane]
        batch = lane.batch
        for transfer in lane.carry_out(progress)[1]:
            self.messages[lane.source(transfer)].append(("drained", progress.lane, transfer))
        if progress.complete:
            tokens, digests = lane.finish()
            self.tokens[batch].update(tokens)
            self.digests[batch].update(digests)
            self.open[progress.lane].discard(device)
