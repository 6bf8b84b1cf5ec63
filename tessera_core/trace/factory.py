"""From what the user names (a catalogue name, ``file.py:factory`` or a ``.pt2``) to a model that can be traced."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera_core.program.ir import ITEM_BYTES
from tessera_core.trace.fake import building
from tessera_core.trace.inputs import input_kind
from tessera_core.trace.inputs.export import ExportedModel
from tessera_core.trace.load import import_file
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.models import build_model, model_shape
from tessera_core.trace.network import no_network
from tessera_core.trace.parallel.shares import Shard
from tessera_core.trace.place import user_code
from tessera_core.trace.streams import symbolic_streams
from tessera_core.trace.threads import watched_threads
from tessera_formats.errors import InputError, ModelError


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model and what the manifest says about where it comes from.

    ``origin``: the manifest's ``model``, ``source`` and, for a user's factory or a ``.pt2``, ``factory`` and
    ``factory_hash``. ``dtype``: name of the weights' dtype. ``shard``: which part it is; None: the whole.
    """

    model: TraceableModel
    origin: dict[str, str]
    dtype: str
    shard: Shard | None = None


def parse_dtype(text: str | None) -> torch.dtype | None:
    """A dtype by PyTorch's name, None for the model's own; raises :class:`InputError` for other names."""
    if text is None:
        return None
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or text not in ITEM_BYTES:
        names = sorted(name for name in ITEM_BYTES if "float" in name)
        raise InputError(f"dtype {text!r}: is not a dtype of weights; choose one of {', '.join(names)}")
    return found


def build(
    name: str,
    dtype: torch.dtype | None,
    seed: int,
    fake_mode: FakeTensorMode | None,
    *,
    on_device: bool = False,
) -> BuiltModel:
    """Make the model called ``name``; ``on_device``: to run on a CUDA device, so that its streams are real ones.

    Raises :class:`InputError` for an unknown name or file, and :class:`ModelError` (one line with the
    exception and its place) where a factory raises or returns something else.
    """
    if input_kind(name) == "export":
        return _from_export(Path(name), dtype, fake_mode)
    path, colon, factory_name = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), factory_name, dtype, seed, fake_mode, name, on_device)
    if name.endswith(".py"):
        raise InputError(f"model {name!r}: names no factory; write it as {name}:FACTORY")
    shape = model_shape(name)
    source = "embedded" if shape.source == "embedded" else "catalogue"
    model = _guarded(name, fake_mode, on_device, lambda: build_model(name, dtype, seed))
    return BuiltModel(model, {"model": name, "source": source}, _dtype_of(model, dtype))


def _from_file(
    path: Path,
    name: str,
    dtype: torch.dtype | None,
    seed: int,
    fake_mode: FakeTensorMode | None,
    said: str,
    on_device: bool,
) -> BuiltModel:
    if not path.is_file():
        raise InputError(f"model {said!r}: there is no file {path}; check the path")
    source_hash = hashlib.sha256(path.read_bytes()).hexdigest()
    module = _guarded(said, None, on_device, lambda: import_file(path.resolve(), path.stem))
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"model {said!r}: {path} has no function {name}; check the name after the colon")
    chosen = dtype if dtype is not None else torch.float32
    model = _guarded(said, fake_mode, on_device, lambda: factory(dtype=chosen, seed=seed))
    if not isinstance(model, TraceableModel):
        raise ModelError(
            f"model {said!r}: the factory returns an object of type {type(model).__name__}, which lacks what"
            " tessera_core.trace.model.TraceableModel asks for; return such an object"
        )
    origin = {
        "model": said,
        "source": "factory",
        "factory": f"{path.resolve()}:{name}",
        "factory_hash": source_hash,
    }
    return BuiltModel(model, origin, _dtype_of(model, dtype))


def _from_export(path: Path, dtype: torch.dtype | None, fake_mode: FakeTensorMode | None) -> BuiltModel:
    if dtype is not None:
        raise InputError(f"{path}: was exported with its dtypes; drop --dtype, or export it with another one")
    model = ExportedModel.open(path, fake_mode)
    return BuiltModel(model, model.origin, _dtype_of(model, None))


def _guarded(said: str, fake_mode: FakeTensorMode | None, on_device: bool, make: Any) -> Any:
    """Call the user's code; whatever it raises becomes one line."""
    streams = contextlib.nullcontext() if on_device else symbolic_streams()
    factory = f"model {said!r}: its factory"
    code = user_code(factory, "correct it and trace again")
    with code, no_network(factory), watched_threads(), building(fake_mode), streams:
        return make()


def _dtype_of(model: TraceableModel, asked: torch.dtype | None) -> str:
    first = next(iter(model.module.parameters()), None)
    found = asked if asked is not None else first.dtype if first is not None else torch.float32
    return str(found).removeprefix("torch.")
