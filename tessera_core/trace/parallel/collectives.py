"""The operators by which ranks join their parts, and the lookup in a shared embedding.

Under an initialised ``torch.distributed`` process group with as many ranks as the trace has, the collectives
communicate over it. Without one a rank is alone: an all-reduce returns the rank's own part, and an all-gather its
own part between zeros; shapes, times and memory are those of the real thing, values are not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def _communicates(ranks: int) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    if dist.get_world_size() != ranks:
        raise RuntimeError(
            f"the process group has {dist.get_world_size()} ranks, the trace's collectives {ranks}"
        )
    return True


@torch.library.custom_op("tessera::all_reduce", mutates_args=())
def all_reduce(part: torch.Tensor, ranks: int) -> torch.Tensor:
    """The sum of all ranks' ``part``; shape, dtype and strides are the same on every rank."""
    total = part.clone(memory_format=torch.contiguous_format)
    if _communicates(ranks):
        dist.all_reduce(total)
    return total


@all_reduce.register_fake
def _(part: torch.Tensor, ranks: int) -> torch.Tensor:
    return part.new_empty(part.shape)


@torch.library.custom_op("tessera::all_gather", mutates_args=())
def all_gather(part: torch.Tensor, extents: list[int], rank: int) -> torch.Tensor:
    """All ranks' parts in a row along the last axis; ``extents[rank]`` is the last extent of ``part``."""
    outer = part.shape[:-1]
    if not _communicates(len(extents)):
        whole = part.new_zeros((*outer, sum(extents)))
        start = sum(extents[:rank])
        whole[..., start : start + extents[rank]] = part
        return whole
    # Back ends want equal shapes of all ranks, and shares may be uneven.
    padded = part.new_zeros((*outer, max(extents)))
    padded[..., : extents[rank]] = part
    parts = [torch.empty_like(padded) for _ in extents]
    dist.all_gather(parts, padded)
    return torch.cat([each[..., :extent] for each, extent in zip(parts, extents, strict=True)], dim=-1)


@all_gather.register_fake
def _(part: torch.Tensor, extents: list[int], rank: int) -> torch.Tensor:
    return part.new_empty((*part.shape[:-1], sum(extents)))


@torch.library.custom_op("tessera::vocabulary_rows", mutates_args=())
def vocabulary_rows(tokens: torch.Tensor, table: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """Embeddings of the ``tokens`` in this rank's part of the table, zeros for all others.

    ``tokens`` int64 of any shape, below ``rows``; ``table`` (part, width) holds the rows from ``start`` on of
    ``rows``. Returns (*tokens, width).
    """
    own = tokens - start
    elsewhere = (own < 0) | (own >= table.shape[0])
    found = torch.nn.functional.embedding(own.masked_fill(elsewhere, 0), table)
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


@vocabulary_rows.register_fake
def _(tokens: torch.Tensor, table: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    return table.new_empty((*tokens.shape, table.shape[1]))
