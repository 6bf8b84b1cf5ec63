"""The catalogue: models that can be traced by name, with seeded random weights and without any hub.

An entry is one :class:`~tessera_core.trace.models.shapes.Shape`, which names the class that builds it; this
module imports neither PyTorch nor a model library nor Triton before a model is built.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from tessera_core.trace.models.catalogue import CATALOGUE
from tessera_core.trace.models.shapes import Shape
from tessera_formats.errors import InputError, ModelError

if TYPE_CHECKING:
    import torch

    from tessera_core.trace.model import TraceableModel


def model_names() -> tuple[str, ...]:
    """Names of all catalogued models."""
    return tuple(shape.name for shape in CATALOGUE)


def model_shape(name: str) -> Shape:
    """The catalogue's entry for ``name``; raises :class:`InputError` that lists the names."""
    for shape in CATALOGUE:
        if shape.name == name:
            return shape
    near = difflib.get_close_matches(name, model_names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(model_names())}"
    raise InputError(f"model {name!r}: is not in the catalogue; {hint} (or pass FILE.py:FACTORY)")


def build_model(name: str, dtype: torch.dtype | None, seed: int) -> TraceableModel:
    """Build a catalogued model; ``dtype`` None means the model's own.

    Under an active fake-tensor mode the weights stay fake. Raises :class:`InputError` for an unknown name and
    :class:`ModelError` where the library that defines the model is not installed.
    """
    import torch

    shape = model_shape(name)
    chosen = dtype if dtype is not None else getattr(torch, shape.dtype)
    module, _, builder = shape.builder.partition(":")
    try:
        model: TraceableModel = getattr(importlib.import_module(module), builder)(
            shape, dtype=chosen, seed=seed
        )
        return model
    except ModuleNotFoundError as problem:
        raise ModelError(
            f"model {name}: needs {problem.name}; run: pip install 'tessera-toolchain[models]'"
        ) from problem
