"""Tracing a model: its programs one after the other into one trace that shares weights and constants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera_core.program.guards import NOT_REPLAYABLE
from tessera_core.program.ir import Guard, IoBinding, Program, Trace, Weight
from tessera_core.trace.bindings import check_feeds, check_guards_of, check_kept, keep_unnamed
from tessera_core.trace.declare import declaration_of
from tessera_core.trace.encode import map_tensors
from tessera_core.trace.factory import BuiltModel
from tessera_core.trace.fake import building, is_fake
from tessera_core.trace.inner import Launch
from tessera_core.trace.kernels import build_kernels
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.parallel.shares import Shard
from tessera_core.trace.parallel.ties import tie_kernels
from tessera_core.trace.place import user_code
from tessera_core.trace.recorder import BoundInput, Recorder
from tessera_core.trace.registry import Registry, form_problem, storage_bytes, storage_key
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.streams import Timeline, symbolic_streams
from tessera_core.trace.threads import one_thread
from tessera_core.trace.tracer import FunctionMode, OpMode
from tessera_core.trace.triton_launch import intercepting, kernel_target
from tessera_formats.errors import InputError, ModelError

_CORRECT = "correct it and trace again"


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace and, by program id, the launches of the user's Triton kernels in it, by op."""

    trace: Trace
    launches: tuple[tuple[Launch, ...], ...]


def trace_model(
    built: BuiltModel,
    requests: Sequence[ProgramRequest],
    *,
    seed: int,
    fake_mode: FakeTensorMode | None,
    versions: dict[str, str],
    progress: Callable[[str], None] = lambda message: None,
) -> Traced:
    """Record one iteration of each request.

    Raises :class:`ModelError` and :class:`UntracedLaunchError` for a step that fails or cannot be traced, in
    one line with the place in the user's code.
    """
    registry = Registry()
    model = built.model
    weights, names = _register_weights(registry, model, fake_mode is not None)
    programs: list[Program] = []
    launches: list[tuple[Launch, ...]] = []
    hidden: dict[str, None] = {}
    for number, request in enumerate(requests):
        progress(f"tracing {request.name}")
        recorder = Recorder(registry, number, fake_mode, names=names)
        program = _trace_program(recorder, built, request)
        if built.shard is not None:
            cut = {weight.buffer for weight in weights if "slice" in weight.init}
            kept = {state.name for state in model.states if "slice" in state.init}
            program = tie_kernels(program, registry.tensors, cut, kept)
        programs.append(program)
        launches.append(tuple(recorder.launches))
        hidden |= recorder.hidden
    check_feeds(model.feeds, programs, registry, f"model {built.origin['model']!r}")
    keep_unnamed(registry, programs, weights)
    constants = {
        f"buffer.{number}": np.frombuffer(value, dtype=np.uint8)
        for number, value in registry.constants().items()
    }
    lost = [e for e in registry.buffers if e.kind == "constant" and e.value is None]
    notes = [*getattr(model, "notes", ())]
    notes += sorted(hidden)
    notes += [f"{NOT_REPLAYABLE}constant {e.name or e.id} has no values; trace without --fake" for e in lost]
    undeclared = {
        kernel_target(launch.kernel)
        for launched in launches
        for launch in launched
        if declaration_of(launch.kernel) is None
    }
    notes += [
        f"{NOT_REPLAYABLE}kernel {target} has no CPU implementation;"
        " declare one with tessera_core.trace.declare.triton_cpu"
        for target in sorted(undeclared)
    ]
    info = {
        **built.origin,
        "seed": seed,
        "dtype": built.dtype,
        "fake": fake_mode is not None,
        **_shard_info(built.shard),
        "replayable": not lost and not undeclared,
        "notes": notes,
        "versions": versions,
    }
    trace = Trace(
        info=info,
        programs=tuple(programs),
        buffers=tuple(entry.freeze(entry.id) for entry in registry.buffers),
        tensors=tuple(registry.tensors),
        weights=weights,
        states=tuple(model.states),
        constants=safetensors.numpy.save(constants),
    )
    return Traced(trace, tuple(launches))


def _shard_info(shard: Shard | None) -> dict[str, Any]:
    return {} if shard is None else {"tensor_parallel": list(shard.shares), "rank": shard.rank}


def _register_weights(
    registry: Registry, model: TraceableModel, fake: bool
) -> tuple[tuple[Weight, ...], dict[int, str]]:
    """Buffers and weight rows of all parameters and persistent buffers; names of the other module buffers."""
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    others = dict(model.module.named_buffers(remove_duplicate=False))
    persistent = {name: others[name] for name in model.module.state_dict(keep_vars=True) if name in others}
    for name, tensor in others.items():
        check_form(tensor, f"buffer {name} of the module")
    names = {storage_key(tensor): name for name, tensor in others.items()}
    rows: dict[int, Weight] = {}
    for name, tensor in {**parameters, **persistent}.items():
        check_form(tensor, f"weight {name}")
        recipe = None if model.recipes is None else model.recipes.get(name)
        constant = name in persistent and recipe is None
        if constant and is_fake(tensor):
            raise ModelError(
                f"weight {name}: is a buffer without a recipe whose values --fake does not have;"
                " add a recipe for it, or trace without --fake"
            )
        entry = registry.find(tensor) or registry.add(
            tensor, program=None, kind="weight", name=name, depends=True, real=constant or not fake
        )
        view = registry.view(tensor, entry)
        if view in rows:
            rows[view] = replace(rows[view], aliases=(*rows[view].aliases, name))
            continue
        if constant:
            entry.value = storage_bytes(tensor.untyped_storage())
        init = {"kind": "constant"} if constant else recipe or {"kind": "factory"}
        rows[view] = Weight(name=name, aliases=(), buffer=entry.id, tensor=view, init=init)
    for buffer in {weight.buffer for weight in rows.values()}:
        kinds = {weight.init["kind"] for weight in rows.values() if weight.buffer == buffer}
        registry.buffers[buffer].depends = kinds != {"constant"}
    return tuple(rows.values()), names


def _trace_program(recorder: Recorder, built: BuiltModel, request: ProgramRequest) -> Program:
    model, registry = built.model, recorder.registry
    number, fake_mode = recorder.program, recorder.fake_mode
    said = f"model {built.origin['model']!r}, {request.name}"
    with user_code(f"{said}:", _CORRECT), building(fake_mode), symbolic_streams():
        state = model.make_state(request)
        inputs = model.make_inputs(request)
    families = {family.name for family in model.states}
    if set(state) != families:
        raise ModelError(
            f"{said}: make_state returns {sorted(state)}, but states declares {sorted(families)};"
            " make them agree"
        )
    io: list[IoBinding] = []
    for name, tensor in inputs.items():
        check_form(tensor, f"{said}: input {name}")
        found = registry.find(tensor)
        # A model may keep its example inputs: that of an earlier program is another buffer here.
        if found is not None and (found.kind != "input" or found.program == number):
            raise ModelError(f"{said}: input {name} shares memory with {found.kind} {found.name}; copy it")
        entry = registry.add(
            tensor, program=number, kind="input", name=name, depends=True, real=fake_mode is None
        )
        view = registry.view(tensor, entry)
        recorder.inputs[entry.id] = BoundInput(name, registry.tensors[view])
        io.append(IoBinding(role="input", name=name, tensor=view, feeds=None))
    for name, tensor in state.items():
        check_form(tensor, f"{said}: state {name}")
        entry = registry.find(tensor) or registry.add(
            tensor, program=number, kind="state", name=name, depends=True, real=fake_mode is None
        )
        if entry.kind != "state" or entry.program != number:
            raise ModelError(f"{said}: state {name} shares memory with {entry.kind} {entry.name}; copy it")
        io.append(IoBinding(role="state", name=name, tensor=registry.view(tensor, entry), feeds=None))
    kept = dict(state)
    run = user_code(f"{said}:", _CORRECT)
    # What an op does within itself with streams is its own affair, like all else there.
    inside = Timeline()
    streams = symbolic_streams(lambda: inside if recorder.silent else recorder.streams)
    with _scopes(model.module, recorder), run, one_thread(), torch.no_grad(), intercepting(recorder), streams:
        mode = OpMode(recorder)
        with mode, FunctionMode(mode):
            outputs = model.step(request, dict(inputs), kept)
            if isinstance(outputs, dict):
                outputs = map_tensors(outputs, mode.resolved)
    check_joined(recorder, said)
    check_kept(kept, io, registry, said)
    io += _outputs(registry, recorder, model.feeds, outputs, said)
    ops, kernels = build_kernels(recorder.ops, registry)
    with user_code(f"{said}:", _CORRECT):
        guards: tuple[Guard, ...] = (*model.guards(request), *recorder.guards)
    check_guards_of(guards, request.phase, io, registry, recorder.host_reads, said)
    return Program(
        id=number,
        name=request.name,
        phase=request.phase,
        batch=request.batch,
        context=request.context,
        ops=ops,
        kernels=kernels,
        io=tuple(io),
        guards=guards,
        stream_waits=tuple(recorder.streams.waits),
    )


def check_form(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that a trace cannot hold; raises :class:`ModelError`."""
    problem = form_problem(tensor)
    if problem is not None:
        raise ModelError(f"{what}: is {problem}")


def check_joined(recorder: Recorder, said: str) -> None:
    """Refuse a step that ends before its side streams do; raises :class:`ModelError`."""
    last = recorder.streams.unjoined()
    if last is not None:
        op = recorder.ops[last]
        raise ModelError(
            f"{said}: op {last} ({op.target}) runs on side stream {op.stream}, which the step does not wait for; end"
            " the step with torch.cuda.current_stream().wait_stream(...) on it"
        )


def _outputs(
    registry: Registry,
    recorder: Recorder,
    feeds: Mapping[str, str],
    outputs: Any,
    said: str,
) -> list[IoBinding]:
    if not isinstance(outputs, dict) or not all(isinstance(t, torch.Tensor) for t in outputs.values()):
        raise ModelError(f"{said}: step returns no dict of tensors by name; return one")
    rows = []
    for name, tensor in outputs.items():
        check_form(tensor, f"{said}: output {name}")
        entry = recorder.entry(tensor, f"output {name}")
        if entry.kind == "activation":
            entry.kind, entry.name = "output", name
        view = registry.view(tensor, entry)
        rows.append(IoBinding(role="output", name=name, tensor=view, feeds=feeds.get(name)))
    return rows


@contextlib.contextmanager
def _scopes(module: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let the recorder know which submodule is running, as its qualified name."""
    names = {id(part): name for name, part in module.named_modules()}
    running: list[str] = []

    def enter(part: torch.nn.Module, _args: Any) -> None:
        running.append(names.get(id(part), running[-1] if running else ""))

    def leave(_part: torch.nn.Module, _args: Any, _result: Any) -> None:
        running.pop()

    recorder.scope = lambda: running[-1] if running else ""
    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_requests(requests: Sequence[ProgramRequest]) -> None:
    """Refuse an empty list and repeated programs; raises :class:`InputError`."""
    if not requests:
        raise InputError("no program to trace: pass --program decode:batch=64,context=1024 (or --phase ...)")
    names = [request.name for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"program {name}: is asked for twice; pass it once")
