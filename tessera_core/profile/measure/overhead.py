"""What a segment costs a worker beside its kernels and transfers, measured on the executor's own parts.

A worker chooses the segment, polls its inbox, records a span, keeps the tokens made, puts them into the next
iteration's input and prepares that. :func:`bookkeeping` does all of it around one kernel of next to no work and
counts what is not the kernel. So the cost is that of a segment that ends an iteration: exact where a device has
one segment per iteration, as usual, and a few microseconds too much for each further one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

from safetensors.numpy import save

from tessera_core.devices.cpu import CpuDevice
from tessera_core.execute.arena import Inbox, arena_layout
from tessera_core.execute.dispatch import Dispatcher, Progress
from tessera_core.execute.process import child
from tessera_core.execute.segments import Feed, RouteModel, RouteProgram, Segment
from tessera_core.program.ir import Buffer, IoBinding, Kernel, Op, Operand, Program, TensorRef, Trace
from tessera_formats.errors import DeviceLostError

SegmentLoop = Callable[[int], float]
"""Passes through that many segments; gives the nanoseconds that were not kernels'. A module's own function, as it
runs in a new process."""

SEGMENTS = 2_000
"""Segments of one pass: long enough that the clock's own cost and resolution vanish."""

REPEATS = 9
"""Passes, of which the median counts."""

# Slots of the small route, as many as a usual plan has in flight, and requests of a batch.
_LANES, _BATCH = 4, 4
_DEVICE = "worker"


def bookkeeping(segments: int) -> float:
    """What the executor's worker does around ``segments`` segments, one per iteration, nothing shipped."""
    import torch  # late, as the affinity must be set before

    from tessera_core.execute.lane import build_lanes

    trace, model = _small_trace(), _small_route()
    layout = arena_layout(trace, [model])
    torch.set_num_threads(1)
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with torch.inference_mode():
        lanes = build_lanes(
            trace, [model], _DEVICE, memoryview(bytearray(layout.bytes)), layout,
            seed=0, weights_file=None, trusted=False,
        )  # fmt: skip
        dispatcher = Dispatcher(_DEVICE, [model])
        inbox = Inbox(read, read, 0.0)
        spans: list[tuple[str, int, int, int, int, int]] = []
        now = time.monotonic_ns

        def carry_out(progress: Progress) -> None:
            lanes[progress.lane].carry_out(progress)

        schedule = [0] * (segments // model.slots)
        for number, lane in enumerate(lanes):
            lane.warm_up()
            lane.start(number, range(number * _BATCH, (number + 1) * _BATCH), schedule)
            carry_out(dispatcher.start(number, number, schedule, now()))
        computing, started = 0, now()
        # The steps of execute.worker, in its order.
        while (work := dispatcher.pick()) is not None:
            lane = lanes[work.lane]
            begun = now()
            lane.compute(work.program, work.segment.index)
            ended = now()
            computing += ended - begun
            spans.append(("compute", work.lane, work.batch, work.iteration, begun, ended))
            lane.collect(work.program, work.segment.index, work.iteration)
            carry_out(dispatcher.done(work, ended))
            inbox.read()
        passed = now() - started
    os.close(read)
    os.close(write)
    return passed - computing


def segment_overhead_us(cpu: CpuDevice, loop: SegmentLoop = bookkeeping) -> float:
    """Median time that a segment of ``loop`` takes on ``cpu`` beside its kernels, in microseconds, over passes.

    Raises :class:`DeviceLostError` where the measuring process dies.
    """
    with child(_time, cpu, loop) as worker:
        try:
            times: list[float] = worker.connection.recv()
        except (EOFError, OSError) as problem:
            raise DeviceLostError(
                f"the worker on {cpu.name} was lost while its overhead was measured; run tessera profile again"
            ) from problem
    return median(times)


def _time(connection: Connection, cpu: CpuDevice, loop: SegmentLoop) -> None:
    cpu.pin()
    loop(SEGMENTS // 10)
    connection.send([loop(SEGMENTS) / 1e3 / SEGMENTS for _ in range(REPEATS)])


def _small_route() -> RouteModel:
    """One program of one segment on one device, whose token feeds the next iteration."""
    segment = Segment(
        device=_DEVICE,
        index=0,
        kernels=(0,),
        duration_us=0.0,
        receives=(),
        sends=(),
        frees=(),
        fed=("token",),
    )
    program = RouteProgram(
        index=0,
        name="small",
        rate=1,
        target=0,
        segments={_DEVICE: (segment,)},
        feeds=(Feed(output="next", input="token", device=_DEVICE, transfer=None),),
    )
    return RouteModel(
        route=0, slots=_LANES, batch=_BATCH, share=1.0, devices=(_DEVICE,), programs=(program,), transfers=()
    )


def _small_trace() -> Trace:
    """A token per request that is negated; what is left of a decode step without a model."""
    buffers, tensors = [], []
    for number, kind in enumerate(("input", "output")):
        buffers.append(
            Buffer(id=number, program=0, kind=kind, bytes=8 * _BATCH, name=kind, real=True)  # type: ignore[arg-type]
        )
        tensors.append(
            TensorRef(id=number, buffer=number, dtype="int64", shape=(_BATCH, 1), stride=(1, 1), offset=0)
        )
    op = Op(
        id=0,
        kernel=0,
        target="aten.neg.default",
        schema="aten::neg",
        arguments={"args": [{"tensor": 0}], "kwargs": {}},
        inputs=(0,),
        outputs=(1,),
        operands=(
            Operand(tensor=0, mode="read", must=False, valid_for="shapes", evidence="schema", boxes=None),
            Operand(tensor=1, mode="write", must=True, valid_for="shapes", evidence="schema", boxes=None),
        ),
    )
    kernel = Kernel(
        id=0,
        signature="small",
        name="neg",
        kind="other",
        flops=0,
        read_bytes=8 * _BATCH,
        written_bytes=8 * _BATCH,
        state_writer="none",
        dtype="int64",
        layer=None,
        ops=(0,),
    )
    program = Program(
        id=0,
        name="small",
        phase="decode",
        batch=_BATCH,
        context=1,
        ops=(op,),
        kernels=(kernel,),
        io=(
            IoBinding(role="input", name="token", tensor=0, feeds=None),
            IoBinding(role="output", name="next", tensor=1, feeds="token"),
        ),
        guards=(),
    )
    return Trace(
        info={"seed": 0}, programs=(program,), buffers=tuple(buffers), tensors=tuple(tensors),
        weights=(), states=(), constants=save({}),
    )  # fmt: skip
