"""Interception of Triton kernels that user code launches while it is traced on a machine without a GPU.

A launch becomes one op with its grid and arguments. It is executed by the CPU implementation that its author
declared, or else by Triton's interpreter in a process of its own (interpretation changes ``triton.language``
for a whole process). Arguments that the declaration does not claim to write must not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tessera_core.program.ir import Evidence, Mode, Operand
from tessera_core.trace.declare import TritonDeclaration, declaration_of
from tessera_core.trace.encode import encode
from tessera_core.trace.inner import InnerLaunch, InnerWork, Launch, Pointer
from tessera_core.trace.place import calling_place, failing_place, one_line
from tessera_core.trace.recorder import Recorder, encode_named
from tessera_core.trace.registry import dtype_name, storage_bytes
from tessera_core.trace.streams import SymbolicStream
from tessera_formats.errors import ModelError, UntracedLaunchError

HELPER_SECONDS = 120
"""What a helper process may take for a launch in the interpreter, or to compile one specialisation."""


@contextlib.contextmanager
def intercepting(recorder: Recorder) -> Iterator[None]:
    """Turn launches of ``@triton.jit`` functions inside into ops of ``recorder``."""

    def launch(kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        _launch(recorder, kernel, args, grid, kwargs)

    with _launching_by(launch):
        yield


@contextlib.contextmanager
def launching_on_cpu() -> Iterator[None]:
    """Let launches of ``@triton.jit`` functions inside run on the CPU, as they do while tracing."""

    def launch(kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
        target = kernel_target(kernel)
        arguments, _ = _bound(kernel, args, kwargs, target)
        _execute(kernel, declaration_of(kernel), arguments, _grid(grid, arguments, target), target)

    with _launching_by(launch):
        yield


@contextlib.contextmanager
def _launching_by(launch: Callable[[Any, Any, Any, dict[str, Any]], None]) -> Iterator[None]:
    """Let ``launch(kernel, positional, grid, named)`` stand for Triton's own launches."""
    if "triton" not in sys.modules:
        # A model that has not imported Triton has no kernel to launch.
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run, tuned = JITFunction.run, Autotuner.run

    def intercepted(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if warmup:
            raise UntracedLaunchError(
                f"{kernel_target(kernel)}.warmup at {calling_place()}: compiles for a GPU and launches nothing, and a"
                " trace is made without one; leave it out of the step"
            )
        launch(kernel, args, grid, kwargs)

    def first_configuration(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        # Without the GPU there is nothing to measure; the first configuration is as good as any.
        chosen = tuner.configs[0]
        given = {**kwargs, **chosen.all_kwargs()}
        if chosen.pre_hook is not None and not kwargs.get("warmup"):
            chosen.pre_hook({**dict(zip(tuner.arg_names, args)), **given})  # before every launch, as on a GPU
        return tuner.fn.run(*args, **given)

    JITFunction.run, Autotuner.run = intercepted, first_configuration
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tuned


def kernel_target(kernel: Any) -> str:
    """An op's target for a launch of ``kernel``: ``triton.MODULE:QUALNAME``."""
    return f"triton.{kernel.fn.__module__}:{kernel.fn.__qualname__}"


def _launch(recorder: Recorder, kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> None:
    target = kernel_target(kernel)
    arguments, options = _bound(kernel, args, kwargs, target)
    blocks = _grid(grid, arguments, target)
    if recorder.silent:
        # Inside a custom op: the op is what is recorded, and it must still compute.
        with _disable_current_modes():
            _execute(kernel, declaration_of(kernel), arguments, blocks, target)
        if recorder.inside is not None:
            _note_inner(recorder.inside, InnerLaunch(target, kernel, arguments, blocks, options))
        return
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not recorder.knows(value):
            raise UntracedLaunchError(
                f"{target} at {calling_place()}: argument {name} is a tensor that no recorded op made and"
                " that is no weight, input or state; make it in the step, or register a custom op"
            )
    declaration = declaration_of(kernel)
    with recorder.quiet(), _disable_current_modes():
        _record(recorder, kernel, declaration, arguments, blocks, options, target)


def _bound(
    kernel: Any, args: Any, kwargs: dict[str, Any], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A launch's arguments by parameter, and the options that are none."""
    names = set(kernel.arg_names)
    options = {name: value for name, value in kwargs.items() if name not in names}
    try:
        bound = kernel.signature.bind(*args, **{n: v for n, v in kwargs.items() if n in names})
    except TypeError as problem:
        raise ModelError(f"{target} at {calling_place()}: {problem}; correct the launch") from problem
    bound.apply_defaults()
    return dict(bound.arguments), options


def _note_inner(inside: InnerWork, launch: InnerLaunch) -> None:
    constexprs = {p.name for p in launch.kernel.params if p.is_constexpr}
    held = dict(launch.arguments)
    if torch.cuda.current_stream() != SymbolicStream(main=True):
        # The rows of an op's launches follow each other, which nothing says of several streams.
        inside.others.setdefault(f"{launch.target} on a stream of its own")
    for name, value in launch.arguments.items():
        if name in constexprs and not isinstance(value, torch.Tensor):
            held[name] = getattr(value, "value", value)
        if not isinstance(held[name], (torch.Tensor, bool, int, float, str, type(None))):
            inside.others.setdefault(f"{launch.target} with {name}, a {type(value).__name__}")
    inside.launches.append(replace(launch, arguments=held))


def _record(
    recorder: Recorder,
    kernel: Any,
    declaration: TritonDeclaration | None,
    arguments: dict[str, Any],
    blocks: tuple[int, int, int],
    options: dict[str, Any],
    target: str,
) -> None:
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    runtime = {n: v for n, v in arguments.items() if n not in constexprs}
    encoded = encode_named(runtime, recorder, target)
    order = [p.name for p in kernel.params]
    first_constexpr = next((i for i, name in enumerate(order) if name in constexprs), len(order))
    leading = order[:first_constexpr]
    recorded = {
        "args": [encoded[name] for name in leading],
        "kwargs": {name: value for name, value in encoded.items() if name not in leading},
        "constexprs": {name: _constant(arguments[name], name, target) for name in sorted(constexprs)},
        "grid": list(blocks),
        "options": {name: encode(value, _no_tensor, target) for name, value in sorted(options.items())},
        "source_hash": kernel.cache_key,
    }
    pointers = {name: value for name, value in runtime.items() if isinstance(value, torch.Tensor)}
    real = all(recorder.has_value(tensor) for tensor in pointers.values())
    claimed = set(declaration.writes) if declaration else set(pointers)
    changed = set(pointers) & claimed
    if real:
        changed = _execute(kernel, declaration, arguments, blocks, target)
    elif declaration is None:
        changed = set()
    depends = recorder.depends(list(pointers.values()), target)
    for name in sorted(changed & claimed):
        recorder.mark_written(pointers[name], target, depends, real)
    recorder.launches.append(
        Launch(
            op=len(recorder.ops),
            kernel=kernel,
            arguments={n: _pointer(recorder, v) for n, v in runtime.items()} | recorded["constexprs"],
            grid=blocks,
            options=options,
        )
    )
    schema = (
        f"{kernel.fn.__qualname__}({', '.join(_parameter(p.name, arguments[p.name]) for p in kernel.params)})"
    )
    recorder.record(
        target,
        schema,
        recorded,
        (),
        lambda: _operands(declaration, {n: encoded[n]["tensor"] for n in pointers}),
        depends,
    )


def _pointer(recorder: Recorder, value: Any) -> Any:
    """A tensor argument as a pointer into its buffer; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    found = recorder.registry.find(value)
    assert found is not None, "encoding the arguments has registered them"
    offset = int(value.storage_offset()) * value.element_size()
    return Pointer(dtype=dtype_name(value.dtype), byte_offset=offset, buffer=found.id)


def _operands(declaration: TritonDeclaration | None, pointers: dict[str, int]) -> tuple[Operand, ...]:
    operands: list[Operand] = []

    def add(tensor: int, mode: Mode, must: bool, evidence: Evidence) -> None:
        operands.append(
            Operand(tensor=tensor, mode=mode, must=must, valid_for="shapes", evidence=evidence, boxes=None)
        )

    for name, tensor in pointers.items():
        if declaration is None:
            add(tensor, "read", False, "conservative")
            add(tensor, "write", False, "conservative")
            continue
        if name in declaration.reads:
            add(tensor, "read", False, "declared")
        if name in declaration.writes:
            add(tensor, "write", name in declaration.must, "declared")
        if name not in declaration.reads | declaration.writes:
            add(tensor, "read", False, "conservative")
    return tuple(operands)


def _execute(
    kernel: Any,
    declaration: TritonDeclaration | None,
    arguments: dict[str, Any],
    blocks: tuple[int, int, int],
    target: str,
) -> set[str]:
    """Run the launch on the CPU; the names of the tensor arguments that it may have changed."""
    pointers = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    if declaration is None:
        return interpret(kernel, arguments, blocks, target)
    claimed = [pointers[name] for name in declaration.writes if name in pointers]
    shared = {tensor.untyped_storage()._cdata for tensor in claimed}
    unclaimed = {
        name: tensor for name, tensor in pointers.items() if tensor.untyped_storage()._cdata not in shared
    }
    before = {name: _digest(tensor) for name, tensor in unclaimed.items()}
    try:
        declaration.implementation(**arguments)
    except Exception as problem:
        raise ModelError(
            f"{target}: its CPU implementation raises {one_line(problem)} at {failing_place(problem)};"
            " correct it"
        ) from problem
    for name, tensor in unclaimed.items():
        if _digest(tensor) != before[name]:
            raise ModelError(
                f"{target}: its CPU implementation changed {name}, which the declaration does not list;"
                f" add it to writes=(...) of triton_cpu"
            )
    return set(declaration.writes) & set(pointers)


def interpret(kernel: Any, arguments: dict[str, Any], blocks: tuple[int, int, int], target: str) -> set[str]:
    """Run a launch in Triton's interpreter, in another process; the names of the tensors that it changed."""
    pointers = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with tempfile.TemporaryDirectory(prefix="tessera-interpret-") as folder:
        files: dict[int, str] = {}
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                key = value.untyped_storage()._cdata
                if key not in files:
                    files[key] = str(Path(folder) / f"{len(files)}.bin")
                    Path(files[key]).write_bytes(storage_bytes(value.untyped_storage()))
                values[name] = {
                    "file": files[key],
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "shape": list(value.shape),
                    "stride": list(value.stride()),
                    "offset": int(value.storage_offset()),
                }
            else:
                values[name] = {"value": encode(value, _no_tensor, target)}
        job = {**kernel_location(kernel), "arguments": values, "grid": list(blocks)}
        advice = "declare a CPU implementation with tessera_core.trace.declare.triton_cpu"
        answer = run_helper("tessera_core.trace.interpret", job, target, {"TRITON_INTERPRET": "1"}, advice)
        changed = set()
        for name, tensor in pointers.items():
            new = Path(files[tensor.untyped_storage()._cdata]).read_bytes()
            if new != storage_bytes(tensor.untyped_storage()):
                changed.add(name)
        for name in changed:
            storage = pointers[name].untyped_storage()
            new = Path(files[storage._cdata]).read_bytes()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            flat.copy_(torch.frombuffer(bytearray(new), dtype=torch.uint8))
        assert answer.get("done") is True
        return changed


def kernel_location(kernel: Any) -> dict[str, Any]:
    """How another process finds a kernel: its module, file and qualified name."""
    function = kernel.fn
    return {
        "module": function.__module__,
        "file": str(Path(function.__code__.co_filename).resolve()),
        "qualname": function.__qualname__,
    }


def run_helper(
    module: str,
    job: Any,
    target: str,
    environment: dict[str, str],
    advice: str,
    seconds: float = HELPER_SECONDS,
) -> Any:
    """Run ``python -m module`` with a JSON job on stdin and a JSON answer on stdout.

    Raises :class:`UntracedLaunchError` with the helper's last line, and ``advice``, where it fails or takes
    more than ``seconds``.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *[entry for entry in sys.path if entry]])
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": path},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as problem:
        raise UntracedLaunchError(
            f"{target}: cannot be run or compiled without a GPU in {seconds:g} s; {advice}"
        ) from problem
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it ended without a message"]
        raise UntracedLaunchError(
            f"{target}: cannot be run or compiled without a GPU ({lines[-1].strip()}); {advice}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _grid(grid: Any, arguments: dict[str, Any], target: str) -> tuple[int, int, int]:
    sizes = tuple(grid(arguments) if callable(grid) else grid) if not isinstance(grid, int) else (grid,)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ModelError(f"{target} at {calling_place()}: grid {sizes} is not one to three positive numbers")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _constant(value: Any, name: str, target: str) -> Any:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    inner = getattr(value, "value", None)
    if isinstance(inner, (bool, int, float, str)):
        return inner
    raise ModelError(
        f"{target}: constexpr {name} is a {type(value).__name__}, which a trace cannot hold;"
        " pass a number or a string"
    )


def _parameter(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name}: *{str(value.dtype).removeprefix('torch.')}"
    return f"{name}: {type(value).__name__}"


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(storage_bytes(tensor.untyped_storage())).digest()


def _no_tensor(tensor: torch.Tensor) -> int:
    raise AssertionError("a launch option is a tensor")
