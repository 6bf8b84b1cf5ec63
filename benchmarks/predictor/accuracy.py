"""How far predictions lie from published times: errors, coverage and width of intervals, and the plain baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.predictor.points import DTYPE, Mask, Points
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.demand import Floats
from tessera_core.profile.model.physical import Chip

COVERAGE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """Predicted and actual times in microseconds and half-widths of the logarithms' intervals, one per point."""

    time_us: Floats
    half_width: Floats
    actual_us: Floats

    @property
    def errors(self) -> Floats:
        """Relative errors, without sign."""
        return np.abs(self.time_us / self.actual_us - 1)

    def facts(self, rows: Mask | None = None) -> dict[str, Any]:
        """Median and mean error, share inside the intervals, and their median width over the prediction."""
        kept = np.ones(len(self.time_us), dtype=np.bool_) if rows is None else rows
        if not kept.any():
            return {"points": 0}
        half, errors = self.half_width[kept], self.errors[kept]
        inside = np.abs(np.log(self.time_us / self.actual_us))[kept] <= half
        return {
            "points": int(kept.sum()),
            "median": rounded(np.median(errors)),
            "mean": rounded(np.mean(errors)),
            "inside": rounded(np.mean(inside)),
            "width": rounded(np.median(np.exp(half) - np.exp(-half))),
        }


def rounded(value: Any) -> float:
    """Four digits after the point."""
    return round(float(value), 4)


def rooflines(points: Points, stated: bool) -> Floats:
    """Plain rooflines: the larger of flops and bytes over peaks, ``stated`` by the maker or measured."""
    device = ModelledDevice.of(points.gpu)
    if stated:
        chip: Chip = points.chip()
        compute, memory = chip.flops_per_s, chip.memory_bytes_per_s
    else:
        compute, memory = device.compute(DTYPE, matrix=True).per_s, device.memory().per_s
    flops, moved = work_of_points(points)
    found: Floats = np.maximum(flops / compute, moved / memory) * 1e6
    return found


def work_of_points(points: Points) -> tuple[Floats, Floats]:
    """Flops and bytes that every point needs, without padding."""
    demand, sizes = points.demand(), points.sizes
    if points.kind == "products":
        flops = 2 * sizes["m"] * sizes["n"] * sizes["k"]
    elif points.kind == "experts":
        flops = 6 * sizes["tokens"] * sizes["top_k"] * sizes["hidden"] * sizes["intermediate"]
    else:
        window, context = sizes["window"], sizes["context"]
        keys = np.where(window > 0, np.minimum(window, context), context)
        pairs = sizes["batch"] * sizes["heads"] * sizes["head_dim"] * keys
        flops = 4 * pairs if points.kind == "attention-decode" else 2 * pairs * sizes["queries"]
    return flops, demand.data_bytes


def plain_errors(source: Points, target: Points, stated: bool) -> Floats:
    """Relative errors of the source's time times the ratio of rooflines."""
    ratio = rooflines(target, stated) / rooflines(source, stated)
    return np.abs(source.time_us * ratio / target.time_us - 1)


def size_classes(points: Points) -> dict[str, Mask]:
    """Parts of the products: by the weight's size, and by how many rows meet it; of other classes: by length."""
    sizes = points.sizes
    if points.kind == "products":
        weight, m = 2e-6 * sizes["n"] * sizes["k"], sizes["m"]
        return {
            "weights under 10 MB": weight < 10,
            "weights of 10 to 100 MB": (weight >= 10) & (weight < 100),
            "weights above 100 MB": weight >= 100,
            "up to 16 rows": m <= 16,
            "17 to 256 rows": (m > 16) & (m <= 256),
            "above 256 rows": m > 256,
        }
    name = {"attention-decode": "context", "attention-prefill": "queries", "experts": "tokens"}[points.kind]
    return {f"{name} up to 512": sizes[name] <= 512, f"{name} above 512": sizes[name] > 512}
