"""The only door through which replay reaches code that a trace merely names.

Kernels that ship with this package are its own code. Anything else is imported only when the user has said
that they trust the model, and only while the source file still has the hash that was recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tessera_core.program.ir import Op, Trace
from tessera_core.program.operators import TRUSTED_NAMESPACES, refuse_view, resolve_operator
from tessera_core.trace.place import user_code
from tessera_core.trace.streams import symbolic_streams
from tessera_formats.errors import ArtifactError, ModelError, TrustError

EMBEDDED = "tessera_core."
"""Prefix of modules that are this package's own."""


def load_user_module(path: Path, source_hash: str, name: str, trusted: bool) -> ModuleType:
    """Import a Python file named by a trace, as module ``name``.

    Raises :class:`TrustError` without ``trusted``, where the file is gone, or where its sha256 differs from
    ``source_hash``; :class:`ModelError` where importing it raises.
    """
    if not trusted:
        raise TrustError(f"{path}: the trace needs code from this file; pass --trust-model if you trust it")
    try:
        source = path.read_bytes()
    except OSError as problem:
        raise TrustError(
            f"{path}: cannot be read ({problem.strerror}); restore it, or trace again"
        ) from problem
    if hashlib.sha256(source).hexdigest() != source_hash.removeprefix("sha256:"):
        raise TrustError(f"{path}: has changed since the trace was made; restore it, or trace again")
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TrustError(f"{path}: is not a Python file; trace again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # for the modules beside it, as when it was traced
    try:
        # The very bytes that were hashed are run, whatever happens to the file in between.
        with user_code(f"{path}: importing it", "correct it"), _streams():
            exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def recorded_operator(op: Op, trace: Trace, trusted: bool) -> torch._ops.OpOverload:
    """The operator that an op names; one of the user's own exists once the factory's file is imported.

    Raises the errors of :func:`resolve_operator`, :func:`refuse_view` and :func:`load_user_module`.
    """
    if is_custom(op.target) and trusted and "factory_hash" in trace.info:
        _factory_module(trace, trusted)
    overload = resolve_operator(op.target, trusted=trusted)
    refuse_view(op.target, overload)
    return overload


def is_custom(target: str) -> bool:
    """Whether an op's target names a custom operator of the user's."""
    return target.partition(".")[0] not in TRUSTED_NAMESPACES


def on_cpu(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A custom operator whose Triton launches, if it makes any, run by what stands for them on a CPU."""
    from tessera_core.trace.triton_launch import launching_on_cpu

    def call(*args: object, **kwargs: object) -> Any:
        with launching_on_cpu():
            return operator(*args, **kwargs)

    return call


def triton_implementation(op: Op, trace: Trace, trusted: bool, where: str) -> Callable[..., None]:
    """What a raw Triton launch does on a CPU, as a function of its recorded positional and named arguments.

    That is the implementation that the kernel's author declared, or else Triton's interpreter (slow). Raises
    :class:`TrustError` for a kernel of the user's without ``trusted`` or of another source, and
    :class:`ArtifactError` where there is no such kernel.
    """
    from tessera_core.trace.declare import declaration_of

    kernel = triton_kernel(op, trace, trusted, where)
    names = tuple(kernel.arg_names)
    constexprs, grid = op.arguments.get("constexprs", {}), op.arguments.get("grid")
    if not isinstance(constexprs, Mapping) or not set(constexprs) <= set(names):
        raise ArtifactError(f"{where}: its constexprs are not parameters of the kernel; trace again")
    declaration = declaration_of(kernel)
    if declaration is not None:
        implementation = declaration.implementation
    else:
        if not isinstance(grid, list) or len(grid) != 3 or any(type(n) is not int or n < 1 for n in grid):
            raise ArtifactError(f"{where}: grid {grid!r} is not three positive numbers; trace again")
        implementation = _interpreted(kernel, (grid[0], grid[1], grid[2]), op.target)

    def call(*args: object, **kwargs: object) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            implementation(**{**dict(zip(names, args)), **kwargs, **constexprs})

    return call


def triton_kernel(op: Op, trace: Trace, trusted: bool, where: str) -> Any:
    """The ``@triton.jit`` function that an op's target names; errors as :func:`triton_implementation`."""
    from tessera_core.trace.declare import undecorated

    module_name, colon, qualname = op.target.removeprefix("triton.").partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *qualname.split("."))):
        raise ArtifactError(f"{where}: is not triton.MODULE:NAME; trace again")
    embedded = module_name.startswith(EMBEDDED)
    if embedded:
        try:
            module = importlib.import_module(module_name)
        except ImportError as problem:
            raise ArtifactError(
                f"{where}: {module_name} is not part of this version; trace again"
            ) from problem
    else:
        module = _user_module(trace, module_name, trusted, where)
    kernel: Any = module
    for part in qualname.split("."):
        kernel = getattr(kernel, part, None)
    kernel = undecorated(kernel)
    if not hasattr(kernel, "arg_names") or kernel.fn.__module__ != module.__name__:
        raise ArtifactError(f"{where}: {module_name} has no Triton kernel {qualname!r}; trace again")
    if not embedded and kernel.cache_key != op.arguments.get("source_hash"):
        raise TrustError(f"{where}: the kernel's source has changed since the trace was made; trace again")
    return kernel


def _interpreted(kernel: Any, grid: tuple[int, int, int], target: str) -> Callable[..., None]:
    from tessera_core.trace.triton_launch import interpret

    def run(**arguments: Any) -> None:
        interpret(kernel, arguments, grid, target)

    return run


def factory_weights(trace: Trace, names: Sequence[str], trusted: bool) -> dict[str, torch.Tensor]:
    """Values of the weights that only the user's factory can make."""
    if not names:
        return {}
    path, name = _factory(trace)
    module = _factory_module(trace, trusted)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise TrustError(f"{path}: has no factory {name!r}; trace again")
    with user_code(f"{path}:{name}", "correct it"), _streams():
        model = factory(dtype=getattr(torch, str(trace.info["dtype"])), seed=int(trace.info["seed"]))
        values = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    lacking = [weight for weight in names if weight not in values]
    if lacking:
        raise ModelError(f"{path}:{name}: makes no weight {lacking[0]!r}; trace again")
    return {weight: values[weight].detach() for weight in names}


def _factory_module(trace: Trace, trusted: bool) -> ModuleType:
    path, _ = _factory(trace)
    return load_user_module(path, str(trace.info["factory_hash"]), path.stem, trusted)


def _streams() -> contextlib.AbstractContextManager[None]:
    """Streams that a factory makes must be possible where there is no device for them, too."""
    return contextlib.nullcontext() if torch.cuda.is_available() else symbolic_streams()


def _factory(trace: Trace) -> tuple[Path, str]:
    path, colon, name = str(trace.info.get("factory", "")).rpartition(":")
    if not colon or "factory_hash" not in trace.info:
        raise ArtifactError("trace: names user code but no factory file; trace again")
    return Path(path), name


def _user_module(trace: Trace, name: str, trusted: bool, where: str) -> ModuleType:
    """The module of a user's kernel: the factory's own file, or one that importing the factory imports."""
    if not trusted:
        raise TrustError(f"{where}: is code of the user's; pass --trust-model if you trust it")
    path, _ = _factory(trace)
    factory = _factory_module(trace, trusted)
    if name == factory.__name__:
        return factory
    found = sys.modules.get(name)
    if found is None:
        raise TrustError(f"{where}: {path} does not import {name}; trace again")
    return found
