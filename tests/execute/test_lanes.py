"""Lanes and dispatchers of several devices in one process: whatever is placed where, and whatever order messages
arrive in, the tokens are those of the unpartitioned program.
"""

from collections import deque
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.execute.arena import arena_layout
from tessera_core.execute.dispatch import Dispatcher, Progress
from tessera_core.execute.lane import build_lanes
from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.plan.ir import Plan
from tessera_core.program.generate import generate
from tests.execute.helpers import layered_trace, make_plan, place

DEVICES = "abc"
TRACE = layered_trace(layers=2, in_place=True)
PREFILL, DECODE = (program.name for program in TRACE.programs)
KERNELS = len(TRACE.programs[1].kernels)
TOKENS = 5


@cache
def expected(requests: int) -> list[list[int]]:
    found: list[list[int]] = generate(TRACE, *TRACE.programs, range(requests), TOKENS).tolist()
    return found


@st.composite
def placements(draw: st.DrawFn) -> Plan:
    home = draw(st.sampled_from(DEVICES))
    tables = {}
    for name in (PREFILL, DECODE):
        devices = draw(st.lists(st.sampled_from(DEVICES), min_size=KERNELS, max_size=KERNELS))
        devices[2] = devices[3] = home  # the state's writer and reader
        tables[name] = {str(kernel): device for kernel, device in enumerate(devices)}
    route = place(TRACE, tables, slots=draw(st.integers(1, 3)), boxes=draw(st.booleans()))
    return make_plan(route, types=dict.fromkeys(DEVICES, "cpu-1thread"))


class Workers:
    """The devices of a run, taking turns as ``draw`` says."""

    def __init__(self, model: RouteModel, draw: st.DataObject) -> None:
        self.model, self.draw = model, draw
        layout = arena_layout(TRACE, [model])
        arena = memoryview(bytearray(layout.bytes))
        self.dispatchers = {device: Dispatcher(device, [model]) for device in model.devices}
        self.lanes = {
            device: build_lanes(
                TRACE, [model], device, arena, layout, seed=0, weights_file=None, trusted=False
            )
            for device in model.devices
        }
        for lanes in self.lanes.values():
            for lane in lanes:
                lane.warm_up()
        self.messages: dict[str, deque[tuple[str, int, int]]] = {d: deque() for d in model.devices}
        self.waiting = {number: set(model.devices) for number in range(model.slots)}
        self.tokens: dict[int, dict[int, list[int]]] = {number: {} for number in range(model.slots)}
        self.clock = 0

    def run(self) -> None:
        schedule = [0, 0, *[1] * (TOKENS - 1)]
        for lane in range(self.model.slots):
            for device in self.model.devices:
                self.lanes[device][lane].start(lane, [2 * lane, 2 * lane + 1], schedule)
                self.carry_out(device, self.dispatchers[device].start(lane, lane, schedule, 0))
        while any(self.waiting.values()):
            able = [d for d in self.model.devices if self.messages[d] or self.dispatchers[d]._ready]
            assert able, "deadlock"
            self.step(self.draw.draw(st.sampled_from(able)) if len(able) > 1 else able[0])

    def step(self, device: str) -> None:
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
        for transfer in lane.carry_out(progress)[1]:
            self.messages[lane.source(transfer)].append(("drained", progress.lane, transfer))
        if progress.complete:
            tokens, _ = lane.finish()
            self.tokens[progress.lane].update(tokens)
            self.waiting[progress.lane].discard(device)


@settings(deadline=None, max_examples=40)
@given(placements(), st.data())
def test_any_placement_and_any_order_of_events_give_the_same_tokens(plan: Plan, data: st.DataObject) -> None:
    (model,) = plan_routes(plan, TRACE)
    with torch.inference_mode():
        workers = Workers(model, data)
        workers.run()
    for lane in range(model.slots):
        rows = [
            [workers.tokens[lane][0][0], *(workers.tokens[lane][i][0] for i in range(2, TOKENS + 1))],
            [workers.tokens[lane][1][0], *(workers.tokens[lane][i][1] for i in range(2, TOKENS + 1))],
        ]
        assert rows == expected(2 * model.slots)[2 * lane : 2 * lane + 2]
