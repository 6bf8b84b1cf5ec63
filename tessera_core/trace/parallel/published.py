"""The plans that the library ``transformers`` publishes with its models, in this package's words.

Its styles name modules (``colwise``: a product cut by columns) or parameters (``packed_colwise``: gates and ups in a
row, each cut on its own). Which dimension a tensor is cut along follows from where it stands in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tessera_core.trace.parallel.plan import Join, Lookup, Split, matches
from tessera_formats.errors import ModelError


@dataclass(slots=True)
class _Found:
    splits: list[Split] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)


def published_plan(
    module: torch.nn.Module, styles: Mapping[str, str], dimension_of: Callable[[str], str]
) -> tuple[tuple[Split, ...], tuple[Join, ...], tuple[Lookup, ...]]:
    """Splits, joins and lookups of the ``styles`` by pattern; those of which the model has nothing are left out.

    ``dimension_of(pattern)``: name of what is shared there. Raises :class:`ModelError` for an unknown style.
    """
    parameters = dict(module.named_parameters())
    parts = dict(module.named_modules())
    found = _Found()
    for pattern, style in styles.items():
        dimension = dimension_of(pattern)
        own = [name for name in parameters if matches(pattern, name)]
        if own:
            found.splits += _of_parameter(pattern, style, dimension, parameters[own[0]])
        elif any(matches(pattern, name) for name in parts):
            held = {
                name
                for name in ("weight", "bias")
                if any(matches(f"{pattern}.{name}", parameter) for parameter in parameters)
            }
            _of_module(found, pattern, style, dimension, held)
    return tuple(found.splits), tuple(found.joins), tuple(found.lookups)


def _of_parameter(pattern: str, style: str, dimension: str, parameter: torch.Tensor) -> list[Split]:
    match style:
        case "packed_colwise":
            half = parameter.shape[-2] // 2
            return [Split(tensor=pattern, axis=-2, dimension=dimension, sections=(half, half))]
        case "colwise":
            return [Split(tensor=pattern, axis=-2, dimension=dimension)]
        case "rowwise":
            return [Split(tensor=pattern, axis=-1, dimension=dimension)]
    raise _unknown(pattern, style)


def _of_module(found: _Found, pattern: str, style: str, dimension: str, held: set[str]) -> None:
    match style:
        case "colwise" | "colwise_gather_output":
            found.splits += [
                Split(tensor=f"{pattern}.{name}", axis=0, dimension=dimension) for name in sorted(held)
            ]
            if style == "colwise_gather_output":
                found.joins.append(Join(module=pattern, how="all_gather", dimension=dimension))
        case "rowwise":
            found.splits.append(Split(tensor=f"{pattern}.weight", axis=1, dimension=dimension))
            found.joins.append(Join(module=pattern, how="all_reduce"))
        case "moe_tp_experts":
            found.joins.append(Join(module=pattern, how="all_reduce"))
        case "embedding_rowwise":
            found.lookups.append(Lookup(module=pattern, dimension=dimension))
        case "replicated_with_grad_allreduce":
            pass  # says something of training only
        case _:
            raise _unknown(pattern, style)


def _unknown(pattern: str, style: str) -> ModelError:
    return ModelError(
        f"parallel plan of {pattern}: style {style!r} of the model library is not known here;"
        " leave --tensor-parallel out"
    )
