"""Putting the collectives into a module: results of cut layers are joined where the parallel plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tessera_core.trace.parallel.collectives import all_gather, all_reduce, vocabulary_rows
from tessera_core.trace.parallel.parts import CORRECT, Parts
from tessera_core.trace.parallel.plan import matches
from tessera_formats.errors import ModelError


def join_parts(module: torch.nn.Module, parts: Parts) -> None:
    """Change a module whose weights are cut so that its ranks together compute what it did."""
    plan, shard = parts.plan, parts.shard
    for count in plan.counts:
        for _, name, part in _modules(module, count.module, parts.said):
            first, last = parts.own(
                count.dimension, getattr(part, count.attribute), f"{count.attribute} of {name}"
            )
            setattr(part, count.attribute, last - first)
    for lookup in plan.lookups:
        rows = parts.dimension(lookup.dimension).extent
        first, _ = parts.own(lookup.dimension, rows, lookup.dimension)
        for parent, name, part in _modules(module, lookup.module, parts.said):
            setattr(parent, name, _VocabularyPart(part.get_parameter("weight"), first, rows, shard.ranks))
    for join in plan.joins:
        finish = _reduce(shard.ranks)
        if join.how == "all_gather":
            finish = _gather(parts.counts(join.dimension), shard.rank)
        for parent, name, part in _modules(module, join.module, parts.said):
            if join.how == "all_reduce" and isinstance(part, torch.nn.Linear) and part.bias is not None:
                setattr(parent, name, _RowProduct(part, shard.ranks))
            else:
                part.register_forward_hook(_hook(finish, f"{parts.said}: module {join.module}"))


class _RowProduct(torch.nn.Module):
    """A linear layer cut by rows: partial products are summed over the ranks, then the bias is added."""

    def __init__(self, layer: torch.nn.Linear, ranks: int) -> None:
        super().__init__()
        self.weight, self.bias, self.ranks = layer.weight, layer.bias, ranks

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` (..., own inputs); returns (..., outputs)."""
        result: torch.Tensor = all_reduce(torch.nn.functional.linear(source, self.weight), self.ranks)
        return result + self.bias


class _VocabularyPart(torch.nn.Module):
    """An embedding of which this rank holds the rows from ``first`` on."""

    def __init__(self, weight: torch.nn.Parameter, first: int, rows: int, ranks: int) -> None:
        super().__init__()
        self.weight, self.first, self.rows, self.ranks = weight, first, rows, ranks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` int64 of any shape; returns (*tokens, width)."""
        found: torch.Tensor = vocabulary_rows(tokens, self.weight, self.first, self.rows)
        result: torch.Tensor = all_reduce(found, self.ranks)
        return result


def _reduce(ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def finish(part: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = all_reduce(part, ranks)
        return result

    return finish


def _gather(extents: list[int], rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def finish(part: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = all_gather(part, extents, rank)
        return result

    return finish


def _hook(
    finish: Callable[[torch.Tensor], torch.Tensor], said: str
) -> Callable[[Any, Any, Any], torch.Tensor]:
    def hook(module: Any, arguments: Any, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise ModelError(
                f"{said} returns {type(result).__name__}, and only a tensor can be joined; {CORRECT}"
            )
        return finish(result)

    return hook


def _modules(
    module: torch.nn.Module, pattern: str, said: str
) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Modules of a pattern, each with its parent and its name in it."""
    found = [name for name, _ in module.named_modules() if matches(pattern, name)]
    if not found:
        raise ModelError(f"{said}: its parallel plan names module {pattern}, which it lacks; {CORRECT}")
    return [
        (module.get_submodule(parent), short, module.get_submodule(f"{parent}.{short}".removeprefix(".")))
        for parent, _, short in (name.rpartition(".") for name in found)
    ]
