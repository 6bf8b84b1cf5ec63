"""An iteration's time: all groups in one CUDA graph, the ops compiled as one function, the compiled model."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.capture import DEVICE
from benchmarks.capture.iteration import memory_of, values
from tessera_core.program.ir import Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.program.replay import local_buffers
from tessera_core.trace.capture.group import build_group, store_results
from tessera_core.trace.capture.reconcile import materialise
from tessera_core.trace.capture.session import Session, compile_function
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.request import ProgramRequest

ROUNDS, REPLAYS = 25, 8


def timed(
    trace: Trace, program: Program, session: Session, model: Callable[[], TraceableModel]
) -> dict[str, float]:
    """Microseconds of an iteration in one graph: all groups, the ops compiled whole, the compiled model."""
    given = values(trace, program)
    runs: dict[str, tuple[Any, Callable[[], object]]] = {}
    keep: list[Any] = []

    def counters(memory: Memory) -> Callable[[], object]:
        views = [memory.view(b.tensor) for b in program.bindings("state").values()]
        saved = [(v, v.clone()) for v in views if not v.dtype.is_floating_point]
        return lambda: [v.copy_(s) for v, s in saved]

    memory = memory_of(trace, given)
    calls = []
    for kernel in program.kernels:
        group = session.group(program, kernel.id)
        calls.append((group, session.function(kernel.signature, group)))

    def groups() -> None:
        for group, function in calls:
            store_results(group, memory, function(*group.arguments(memory)))

    runs["groups"] = (captured_graph(groups, counters(memory)), counters(memory))
    whole_memory = memory_of(trace, given)
    local = {buffer for buffers in local_buffers(trace, program) for buffer in buffers}
    used = {trace.tensors[b.tensor].buffer for b in program.io}
    local |= {b.id for b in trace.buffers if b.program == program.id and b.id not in used}
    whole = build_group(trace, program, program.ops, local=local, device=DEVICE)
    if not whole.native:
        compiled = compile_function(whole)

        def all_ops() -> None:
            keep[:] = compiled(*whole.arguments(whole_memory))

        try:
            runs["ops"] = (captured_graph(all_ops, counters(whole_memory)), counters(whole_memory))
        except Exception as problem:
            print(f"the ops as one function: {type(problem).__name__}: {problem}"[:2000], file=sys.stderr)
    try:
        runs["model"] = compiled_model(trace, program, model(), given)
    except Exception as problem:
        print(f"torch.compile of the model: {type(problem).__name__}: {problem}"[:2000], file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (graph, reset) in runs.items():
            reset()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize(DEVICE)
            times[name].append(begin.elapsed_time(end) * 1000 / REPLAYS)
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


def captured_graph(run: Callable[[], object], reset: Callable[[], object]) -> Any:
    """A CUDA graph of ``run`` after warming it up."""
    stream = torch.cuda.Stream(DEVICE)
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            reset()
            run()
    torch.cuda.synchronize(DEVICE)
    reset()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def compiled_model(
    trace: Trace, program: Program, model: TraceableModel, given: dict[int, torch.UntypedStorage]
) -> tuple[Any, Callable[[], None]]:
    """The model's own step under ``torch.compile``, on the same values."""
    materialise(model.module, DEVICE)
    memory = memory_of(trace, given)
    named = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    for weight in trace.weights:
        named[weight.name].data.copy_(memory.view(weight.tensor))
    request = ProgramRequest(program.phase, program.batch, program.context)
    inputs = {name: memory.view(b.tensor) for name, b in program.bindings("input").items()}
    state = {name: memory.view(b.tensor) for name, b in program.bindings("state").items()}

    def step(inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return model.step(request, dict(inputs), dict(state))

    compiled = torch.compile(step, dynamic=False)
    saved = [(v, v.clone()) for v in state.values() if not v.dtype.is_floating_point]
    keep: list[Any] = []

    def reset() -> None:
        for view, value in saved:
            view.copy_(value)

    def run() -> None:
        keep[:] = [compiled(inputs, state)]

    return captured_graph(run, reset), reset
