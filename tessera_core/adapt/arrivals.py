"""A workload's requests in order of arrival: listed ones, and ones drawn as a Poisson process per phase.

Draws are counter-based: the k-th gap of phase p is a function of (seed, p, k) alone, so that the same file gives
the same requests everywhere, and changing one phase leaves the others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera_formats.errors import InputError
from tessera_formats.workload import read_workload

# Beyond this many requests a file is taken for a slip in a rate or a time, not for a workload.
REQUESTS_LIMIT = 1_000_000
# Bits of a double's mantissa: a draw of as many is a uniform number without rounding.
_MANTISSA = 53


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its id in order of arrival, when it arrives, and how many tokens it wants."""

    request: int
    arrival_us: float
    output_tokens: int


def read_arrivals(path: Path | str) -> tuple[Arrival, ...]:
    """Requests of a workload file; raises :class:`InputError` if it holds none, or a phase ends before it begins."""
    return arrivals(read_workload(path), str(path))


def arrivals(workload: Mapping[str, Any], where: str) -> tuple[Arrival, ...]:
    """Requests of a workload document, by time (listed ones first at equal times)."""
    drawn: list[tuple[float, int, int]] = [
        (float(row["arrival_ms"]) * 1e3, 0, int(row["output_tokens"])) for row in workload.get("request", [])
    ]
    for number, phase in enumerate(workload.get("phase", [])):
        start, end = float(phase["start_ms"]) * 1e3, float(phase["end_ms"]) * 1e3
        if end < start:
            raise InputError(f"{where}: phase[{number}] ends before it begins; exchange start_ms and end_ms")
        rate = float(phase["requests_per_s"])
        if (end - start) * 1e-6 * rate > REQUESTS_LIMIT:
            raise InputError(
                f"{where}: phase[{number}] would hold more than {REQUESTS_LIMIT:,} requests; lower its rate or length"
            )
        if rate > 0:
            gaps = _exponential(int(workload.get("seed", 0)), number)
            now = start + next(gaps) * 1e6 / rate
            while now < end:
                drawn.append((now, number + 1, int(phase["output_tokens"])))
                now += next(gaps) * 1e6 / rate
    if not drawn:
        raise InputError(f"{where}: holds no request; add [[request]] or [[phase]] entries")
    drawn.sort(key=lambda item: item[:2])
    return tuple(Arrival(index, time, tokens) for index, (time, _, tokens) in enumerate(drawn))


def _exponential(seed: int, stream: int) -> Iterator[float]:
    """Exponential draws of mean 1 from Philox in counter mode, keyed by (seed, stream)."""
    key = np.array([seed & (2**64 - 1), stream], dtype=np.uint64)
    bits = np.random.Philox(key=key)
    while True:
        # The raw stream is stable between NumPy versions, which its distributions are not.
        for raw in bits.random_raw(256):
            uniform = (int(raw) >> (64 - _MANTISSA)) * 2.0**-_MANTISSA
            yield -math.log1p(-uniform)
