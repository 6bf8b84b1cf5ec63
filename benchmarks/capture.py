"""Captured launches on a CUDA device: rebuilt from the stored bytes they give what the same groups give.

For each model: every signature is captured; one iteration of each program is run by the compiled groups, by a
CUDA graph rebuilt from the stored launches over fresh buffers, and by the ops eagerly. Timed for the Llama-3-8B
shapes: all groups in one graph beside ``torch.compile`` of the whole model. ``--save FOLDER`` keeps the traces.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import Bar, report
from tessera_core.program.ir import Program, Trace
from tessera_core.program.memory import Memory, view_of
from tessera_core.program.replay import local_buffers
from tessera_core.program.store import load_trace, trace_tables
from tessera_core.program.weights import fill, materialise_weights, random_inputs
from tessera_core.trace.build import trace_model
from tessera_core.trace.capture.driver import driver
from tessera_core.trace.capture.group import build_group, store_results
from tessera_core.trace.capture.rebuild import build_graph, load_ptx, run_graph, stored_launches
from tessera_core.trace.capture.reconcile import materialise, reconcile, reconcile_model
from tessera_core.trace.capture.session import Session, compile_function
from tessera_core.trace.capture.stage import CaptureStage, capture_values, machine_facts
from tessera_core.trace.factory import BuiltModel, build
from tessera_core.trace.fake import building, new_fake_mode
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.models.catalogue import CATALOGUE
from tessera_core.trace.models.shapes import DecoderShape
from tessera_core.trace.request import ProgramRequest, parse_program
from tessera_core.trace.stage import package_versions
from tessera_formats.errors import TesseraError
from tessera_formats.trace import write_trace

DEVICE = "cuda:0"
SMALL = ("prefill:batch=1,context=16", "decode:batch=4,context=64")
LARGE = ("prefill:batch=1,context=1024", "decode:batch=64,context=1024")
LAYERS = 4
MODELS = ("llama-tiny", "demo", "llama-3-8b-4-layers")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative error (Euclidean norm) of outputs and state against eager execution: other kernels sum in another
order, and eager bfloat16 rounds after every op where a fused kernel rounds once."""
OVERHEAD_BAR = 1.02
ROUNDS, REPLAYS = 25, 8


def make(name: str) -> tuple[Trace, Callable[[], TraceableModel]]:
    """A trace and a function that builds its model without memory."""
    dtype = None
    if name in ("llama-tiny", "demo"):
        built = build(name, dtype, 0, None)
        trace = trace_model(
            built, [parse_program(p) for p in SMALL], seed=0, fake_mode=None, versions=package_versions()
        ).trace
        return trace, lambda: build(name, dtype, 0, new_fake_mode()).model
    from tessera_core.trace.models.llama import LlamaModel

    full = next(shape for shape in CATALOGUE if shape.name == "llama-3-8b")
    assert isinstance(full, DecoderShape)
    shape = replace(full, name=name, layers=LAYERS)

    def model() -> TraceableModel:
        with building(mode := new_fake_mode()):
            made = LlamaModel(shape, dtype=torch.bfloat16, seed=0)
        assert mode is not None
        return made

    mode = new_fake_mode()
    with building(mode):
        made = LlamaModel(shape, dtype=torch.bfloat16, seed=0)
    origin = {"model": name, "source": "catalogue"}
    trace = trace_model(
        BuiltModel(made, origin, "bfloat16"),
        [parse_program(p) for p in LARGE],
        seed=0,
        fake_mode=mode,
        versions=package_versions(),
    ).trace
    return trace, model


def values(trace: Trace, program: Program) -> dict[int, torch.UntypedStorage]:
    """Weights, constants, inputs and state of one iteration on the device, the cache half full and random."""
    found: dict[int, torch.UntypedStorage] = {}

    def storage(buffer: int) -> torch.UntypedStorage:
        if buffer not in found:
            size = trace.buffers[buffer].bytes + 512
            found[buffer] = torch.zeros(size, dtype=torch.uint8, device=DEVICE).untyped_storage()
        return found[buffer]

    generator = torch.Generator(DEVICE).manual_seed(1)
    for weight in trace.weights:
        target = view_of(storage(weight.buffer), trace.tensors[weight.tensor])
        if weight.init["kind"] == "normal":
            target.normal_(0.0, float(weight.init["std"]), generator=generator)
        elif weight.init["kind"] != "constant":
            host = torch.empty(target.shape, dtype=target.dtype)
            fill(host, weight.name, weight.init, 0)
            target.copy_(host)
    constants = [b.id for b in trace.buffers if b.kind == "constant"]
    constants += [w.buffer for w in trace.weights if w.init["kind"] == "constant"]
    for buffer, host_storage in materialise_weights(trace, constants).items():
        bytes_of(storage(buffer), trace.buffers[buffer].bytes).copy_(
            bytes_of(host_storage, trace.buffers[buffer].bytes)
        )
    for name, tensor in random_inputs(trace, program, 7, list(range(program.batch))).items():
        reference = trace.tensors[program.bindings("input")[name].tensor]
        view_of(storage(reference.buffer), reference).copy_(tensor)
    for binding in program.bindings("state").values():
        target = view_of(storage(trace.tensors[binding.tensor].buffer), trace.tensors[binding.tensor])
        if target.dtype.is_floating_point:
            target.normal_(generator=generator)
        else:
            target.fill_(program.context // 2 if program.phase == "decode" else 0)
    return found


def bytes_of(storage: torch.UntypedStorage, count: int) -> torch.Tensor:
    """The first bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))


def memory_of(trace: Trace, given: dict[int, torch.UntypedStorage]) -> Memory:
    """A memory that shares weights and constants, with copies of inputs and state."""
    memory = Memory(trace, device=DEVICE)
    for buffer, storage in given.items():
        shared = trace.buffers[buffer].kind in ("weight", "constant")
        memory.bind(buffer, storage if shared else storage.clone())
    return memory


def results_of(trace: Trace, program: Program, memory: Memory) -> dict[str, torch.Tensor]:
    """Outputs and state by name."""
    return {f"{b.role} {b.name}": memory.view(b.tensor) for b in program.io if b.role != "input"}


def run_groups(session: Session, program: Program, memory: Memory) -> None:
    """One iteration, kernel by kernel."""
    with torch.no_grad():
        for kernel in program.kernels:
            group = session.group(program, kernel.id)
            function = session.function(kernel.signature, group)
            store_results(group, memory, function(*group.arguments(memory)))
    torch.cuda.synchronize(DEVICE)


def rebuilt(
    trace: Trace,
    program: Program,
    rows: dict[str, list[dict[str, Any]]],
    functions: dict[Any, int],
    given: dict[int, torch.UntypedStorage],
) -> Memory:
    """One iteration by a graph built from stored launches; what no launch writes stays poisoned."""
    memory = memory_of(trace, given)
    wanted = {
        r["buffer"] for row in rows["launches"] if row["program"] == program.id for r in row["relocations"]
    }
    for buffer in wanted:
        if not memory.is_bound(buffer):
            size = trace.buffers[buffer].bytes + 512
            poison = torch.full((size,), 0x7F, dtype=torch.uint8, device=DEVICE)
            memory.bind(buffer, poison.untyped_storage())
    scratch = {
        row["workspace"]: torch.zeros(row["bytes"], dtype=torch.uint8, device=DEVICE)
        for row in rows["workspaces"]
    }
    launches = stored_launches(
        rows, program.id, lambda b: memory.storage(b).data_ptr(), lambda w: scratch[w].data_ptr()
    )
    edges = [edge for edge in rows["launch_edges"] if edge["program"] == program.id]
    graph = build_graph(launches, edges, functions)
    torch.cuda.synchronize(DEVICE)
    run_graph(graph, torch.cuda.Stream(DEVICE).cuda_stream)
    driver().cuGraphDestroy(graph)
    return memory


def compare(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Whether all bits agree, and the largest relative error of a floating-point tensor."""
    unequal, error = [], 0.0
    for name, one in first.items():
        other = second[name]
        if not torch.equal(one, other):
            unequal.append(name)
            if one.dtype.is_floating_point:
                difference = torch.linalg.vector_norm((one - other).float())
                found = float(difference / torch.linalg.vector_norm(other.float()))
                error = max(error, found if found == found else float("inf"))
    return {"equal": not unequal, "unequal": unequal[:4], "relative_error": error}


def check_model(name: str, save: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    """Capture one model; rebuild, compare, reconcile and, for the large one, time."""
    started = time.perf_counter()
    trace, model = make(name)
    target, tables, session, captured = CaptureStage(device=DEVICE).capture(trace)
    found: dict[str, Any] = capture_values(target, tables, captured, session)
    found["capture_seconds"] = round(time.perf_counter() - started, 1)
    found["slowest_signatures_seconds"] = sorted(
        (round(s, 1) for s in session.seconds.values()), reverse=True
    )[:5]
    rows = {key: table.to_pylist() for key, table in tables.items()}
    unresolved = _unresolved(captured)
    bars = [
        Bar(f"{name}: pointers of launches left unresolved", unresolved, "= 0", unresolved == 0),
        Bar(
            f"{name}: buffers that the schema reads and no launch reaches",
            found["reads_out_of_reach"],
            "= 0",
            found["reads_out_of_reach"] == 0,
        ),
    ]
    eager = Session(trace=trace, device=DEVICE, compiled=False)
    entries: dict[str, list[str]] = {}
    for row in rows["launches"]:
        if row["module"] is not None and row["function"] not in entries.setdefault(row["module"], []):
            entries[row["module"]].append(row["function"])
    from_ptx = {**session.handles, **load_ptx(rows["modules"], entries)}
    for program in trace.programs:
        given = values(trace, program)
        reference = memory_of(trace, given)
        run_groups(session, program, reference)
        wanted = results_of(trace, program, reference)
        again = memory_of(trace, given)
        run_groups(session, program, again)
        ops = memory_of(trace, given)
        run_groups(eager, program, ops)
        built = rebuilt(trace, program, rows, dict(session.handles), given)
        ptx = rebuilt(trace, program, rows, from_ptx, given)
        checks = {
            "groups_again": compare(results_of(trace, program, again), wanted),
            "rebuilt": compare(results_of(trace, program, built), wanted),
            "rebuilt_from_ptx_text": compare(results_of(trace, program, ptx), wanted),
            "eager": compare(results_of(trace, program, ops), wanted),
        }
        found[program.name] = checks
        error = checks["eager"]["relative_error"]
        limit = TOLERANCE[str(trace.info["dtype"])]
        bars += [
            Bar(
                f"{name} {program.name}: rebuilt graph equals the compiled groups bit for bit",
                checks["rebuilt"]["equal"],
                "= true",
                checks["rebuilt"]["equal"],
            ),
            Bar(
                f"{name} {program.name}: relative error of eager execution",
                error,
                f"<= {limit}",
                error <= limit,
            ),
        ]
        del given, reference, wanted, again, ops, built, ptx
        gc.collect()
        torch.cuda.empty_cache()
    try:
        if name in ("llama-tiny", "demo"):
            done = reconcile(trace, DEVICE, False)
        else:
            real = model()
            materialise(real.module, DEVICE)
            done = reconcile_model(trace, real, DEVICE)
            del real
        found["reconciled"] = {item.program: item.launches for item in done}
    except TesseraError as problem:
        found["reconciled"] = str(problem)
    explained = isinstance(found["reconciled"], dict)
    bars.append(
        Bar(f"{name}: every eager launch is explained by a recorded op", explained, "= true", explained)
    )
    if save is not None:
        everything = {
            **trace_tables(trace),
            **{f"targets/{target}/{key}": table for key, table in tables.items()},
        }
        info = {key: value for key, value in trace.info.items() if key != "program_digest"}
        write_trace(save / f"{name}.trace", info, everything, trace.constants)
        load_trace(save / f"{name}.trace")
    if name == MODELS[-1]:
        for program in trace.programs:
            try:
                times = timed(trace, program, session, model)
            except Exception as problem:
                times = {}
                print(f"timing {program.name}: {type(problem).__name__}: {problem}"[:2000], file=sys.stderr)
            found[f"{program.name} us"] = times
            ratio = round(times["groups"] / times["model"], 4) if "model" in times else None
            bars.append(
                Bar(
                    f"{name} {program.name}: groups over torch.compile of the model",
                    ratio,
                    f"<= {OVERHEAD_BAR}",
                    ratio is not None and ratio <= OVERHEAD_BAR,
                )
            )
    return found, bars


def _unresolved(captured: Sequence[Any]) -> int:
    """Words that still lie in the range of device addresses after resolution, by asking the driver."""
    from tessera_core.trace.capture.addresses import word_offsets
    from tessera_core.trace.capture.driver import allocation_of

    count = 0
    for item in captured:
        for launch, block in zip(item.launches, item.parameters):
            for offset in word_offsets(len(block), launch.layout):
                word = int.from_bytes(block[offset : offset + 8], "little")
                count += word > 1 << 32 and allocation_of(word) is not None
    return count


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


def main() -> int:
    """Check the models that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("capture needs a CUDA device", file=sys.stderr)
        return 2
    build_facts = machine_facts(DEVICE, True)
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "build": build_facts}
    bars: list[Bar] = []
    for name in chosen.models:
        results[name], more = check_model(name, chosen.save)
        bars += more
        gc.collect()
        torch.cuda.empty_cache()
    return report("capture", results, bars, f"{build_facts['device']}, driver {build_facts['driver']}")


if __name__ == "__main__":
    sys.exit(main())
