"""One iteration of a program on the device: its values, and the ways to run it."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.capture import DEVICE
from tessera_core.program.ir import Program, Trace
from tessera_core.program.memory import Memory, view_of
from tessera_core.program.weights import fill, materialise_weights, random_inputs
from tessera_core.trace.capture.driver import driver
from tessera_core.trace.capture.group import Group, store_results
from tessera_core.trace.capture.rebuild import build_graph, run_graph, stored_launches
from tessera_core.trace.capture.session import Session


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
            _run(session, session.group(program, kernel.id), kernel.signature, memory)
    torch.cuda.synchronize(DEVICE)


def run_both(compiled: Session, eager: Session, program: Program, memory: Memory) -> dict[str, Any]:
    """An iteration of the compiled groups; each kernel runs eagerly on the same values too.

    Returns the largest relative error, and the kernel that made it.
    """
    worst: dict[str, Any] = {"relative_error": 0.0, "kernel": None}
    with torch.no_grad():
        for kernel in program.kernels:
            group = compiled.group(program, kernel.id)
            twin = _copied(memory, group)
            _run(eager, group, kernel.signature, twin)
            _run(compiled, group, kernel.signature, memory)
            tensors = (*group.inputs, *group.results)
            found = compare(*({str(t): held.view(t) for t in tensors} for held in (twin, memory)))
            if found["relative_error"] > worst["relative_error"]:
                worst = {"relative_error": found["relative_error"], "kernel": kernel.name}
    torch.cuda.synchronize(DEVICE)
    return worst


def _run(session: Session, group: Group, signature: str, memory: Memory) -> None:
    function = session.function(signature, group)
    store_results(group, memory, function(*group.arguments(memory)))


def _copied(memory: Memory, group: Group) -> Memory:
    """What a group is given, in a memory of its own; weights and constants are shared."""
    trace = memory.trace
    buffers = {trace.tensors[tensor].buffer for tensor in group.inputs}
    return memory_of(trace, {buffer: memory.storage(buffer) for buffer in buffers})


def rerouted(trace: Trace, program: Program, one: Memory, other: Memory) -> dict[str, int] | None:
    """Tokens (counted in every layer) that two runs sent to different experts; None where there are no experts."""
    found = {"tokens": 0, "rerouted": 0}
    for op in program.ops:
        if op.target.startswith("tessera.") and "experts" in op.target:
            chosen = next(t for t in op.inputs if trace.tensors[t].dtype == "int64")
            first, second = (held.view(chosen).sort(dim=1).values for held in (one, other))
            found["tokens"] += first.shape[0]
            found["rerouted"] += int((first != second).any(dim=1).sum())
    return found if found["tokens"] else None


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
                # Masks hold infinities, whose difference and size are no numbers.
                difference = torch.where(one == other, 0.0, (one - other).float())
                size = torch.linalg.vector_norm(other.float().masked_fill(other.isinf(), 0.0))
                found = float(torch.linalg.vector_norm(difference) / size)
                error = max(error, found if found == found else float("inf"))
    return {"equal": not unequal, "unequal": unequal[:4], "relative_error": error}
