"""Who gets how much: the ranks' shares, and what they come to in whole units of what a model can be cut along."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera_formats.errors import InputError

MOST_RANKS = 1024
_EXAMPLE = "write --tensor-parallel 2 for equal shares, or 2,1 for uneven ones"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model a trace is: the ``shares`` of all ranks, and whose part it is."""

    shares: tuple[int, ...]
    rank: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares)


def shard_of(info: Mapping[str, Any]) -> Shard | None:
    """The shard that a trace's manifest names; None: the whole model."""
    shares = info.get("tensor_parallel")
    return None if shares is None else Shard(tuple(shares), int(info["rank"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """What ranks share, named as messages call it (``key-value heads``).

    ``extent``: how many there are. ``unit``: how many stay together, such as the columns of one quantisation
    block; where it does not divide the extent, their greatest common divisor takes its place. ``exact``: equal
    shares must come out equal, because the slowest rank would set everyone's time.
    """

    name: str
    extent: int
    unit: int = 1
    exact: bool = False

    @property
    def units(self) -> int:
        """Number of units."""
        return self.extent // math.gcd(self.extent, self.unit)


def parse_shard(text: str, rank: int) -> Shard:
    """Read ``N`` (equal shares) or ``A,B,...``; raises :class:`InputError` that shows the form."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) and int(part) > 0 for part in parts):
        raise InputError(
            f"tensor parallelism {text!r}: is neither a number of ranks nor their shares; {_EXAMPLE}"
        )
    numbers = tuple(int(part) for part in parts)
    if len(numbers) == 1 and numbers[0] > MOST_RANKS:
        raise InputError(f"tensor parallelism {text!r}: more than {MOST_RANKS} ranks; {_EXAMPLE}")
    shares = (1,) * numbers[0] if len(numbers) == 1 else numbers
    if not 2 <= len(shares) <= MOST_RANKS:
        raise InputError(f"tensor parallelism {text!r}: is one rank, which shares with nobody; leave it out")
    if rank >= len(shares):
        raise InputError(
            f"rank {rank}: there are {len(shares)} ranks, from 0 to {len(shares) - 1}; pass one of them"
        )
    return Shard(shares, rank)


def apportion(dimension: Dimension, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Each rank's range of units, in rank order: the whole units nearest to its share (largest remainder).

    Raises :class:`InputError` where a rank would get nothing, or where equal shares of an exact dimension would
    not come out equal; the message names shares that work.
    """
    units, ranks = dimension.units, len(shares)
    what = (
        f"{units} {dimension.name}"
        if units == dimension.extent
        else (f"{dimension.extent} {dimension.name} in blocks of {dimension.extent // units}")
    )
    if units < ranks:
        raise InputError(f"{what} can't be shared by {ranks} ranks; use at most {units}")
    counts = _nearest(units, shares)
    equal = len(set(shares)) == 1
    if dimension.exact and equal and units % ranks:
        raise InputError(
            f"{what} can't be shared equally by {ranks} ranks; use --tensor-parallel {_written(counts)}"
        )
    if 0 in counts:
        raise InputError(
            f"{what} can't be shared {_written(shares)}: rank {counts.index(0)} would get none;"
            f" use --tensor-parallel {_written(_without_zeros(counts))}"
        )
    ends = [sum(counts[: rank + 1]) for rank in range(ranks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _nearest(units: int, shares: Sequence[int]) -> list[int]:
    total = sum(shares)
    counts = [units * share // total for share in shares]
    left = units - sum(counts)
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(units * shares[rank] % total), rank))
    for rank in by_remainder[:left]:
        counts[rank] += 1
    return counts


def _without_zeros(counts: Sequence[int]) -> list[int]:
    """Those counts with one unit for whoever has none, taken from whoever has most."""
    result = list(counts)
    while 0 in result:
        result[result.index(max(result))] -= 1
        result[result.index(0)] += 1
    return result


def _written(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)
