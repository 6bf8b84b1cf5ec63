"""Kernels as modelled and as looked up, against measurements of one H200 and slices of it (``fixtures/profiles``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predictor.accuracy import rounded
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.predict import modelled_time
from tessera_core.profile.operators import work_of
from tessera_core.profile.silicon.lookup import silicon_rows
from tessera_core.profile.times import TimeRow
from tessera_core.profile.work import Attention, Product, Work
from tessera_core.program.ir import Kernel, Trace
from tessera_core.program.store import load_trace
from tessera_formats.profile import read_profile

PROFILES, TRACES = Path("fixtures/profiles"), Path("fixtures/captures")
WHOLE, SLICES = "h200-sxm", ("h200-sxm/sm=96", "h200-sxm/sm=36")

UNSEEN = ("qwen2.5-32b-1-layer", "qwen2.5-vl-7b-1-layer", "deepseek-tiny")
"""Traces whose measurements chose no start or rate of memory-bound kernels (docs/predictor.md says what they did)."""

LONG_US = 20.0
"""Slices are judged on kernels of at least this on the slice: shorter ones are mostly launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured kernel: ``ratio``: the time said over the measured one; ``inside``: its interval holds it."""

    trace: str
    device_type: str
    kind: str
    bound: str
    measured_us: float
    ratio: float
    inside: bool


def against_measurements() -> dict[str, Any]:
    """Errors by what bounds a kernel and by its class, on the GPU and its slices; of lookups as well.

    ``median``, ``median_unseen``: of kernels bounded by memory on the whole GPU; None without measurements.
    """
    modelled: list[Compared] = []
    looked_up: list[Compared] = []
    for path in sorted(PROFILES.glob("*.profile.arrow")):
        name = path.name.removesuffix(".profile.arrow")
        trace = load_trace(TRACES / f"{name}.trace")
        measured = list(_measured(path, trace.digest))
        works, kernels = _kernels(trace)
        modelled += _modelled(name, works, measured)
        rows = silicon_rows(trace, kernels, (WHOLE,)).rows
        looked_up += _looked_up(name, works, measured, rows)
    whole = [each for each in modelled if each.device_type == WHOLE]
    unseen = [each for each in whole if each.trace in UNSEEN]
    long = [each for each in modelled if each.measured_us >= LONG_US]
    return {
        "median": _median(each for each in whole if each.bound == "memory"),
        "median_unseen": _median(each for each in unseen if each.bound == "memory"),
        "by_bound": _grouped(whole, "bound"),
        "by_bound_unseen": _grouped(unseen, "bound"),
        "by_class": _grouped(whole, "kind"),
        "slices": {
            name: _grouped([each for each in long if each.device_type == name], "kind") for name in SLICES
        },
        "slices_unseen": {
            name: _grouped(
                [each for each in long if each.device_type == name and each.trace in UNSEEN], "kind"
            )
            for name in SLICES
        },
        "looked_up": _grouped(looked_up, "kind"),
    }


def _measured(path: Path, digest: str) -> Iterable[dict[str, Any]]:
    profile = read_profile(path)
    assert profile.header["program_digest"] == digest, f"{path} is of another trace than {TRACES}/"
    for row in profile.table.to_pylist():
        if (row["source"], row["condition"], row["cache"]) == ("measured", "alone", "sequence"):
            yield row


def _kernels(trace: Trace) -> tuple[dict[str, Work], dict[str, Kernel]]:
    works: dict[str, Work] = {}
    kernels: dict[str, Kernel] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            if kernel.signature not in works and kernel.kind != "collective":
                works[kernel.signature] = work_of(trace, program, kernel)
                kernels[kernel.signature] = kernel
    return works, kernels


def _modelled(name: str, works: Mapping[str, Work], measured: list[dict[str, Any]]) -> Iterable[Compared]:
    devices = {kind: ModelledDevice.of(kind) for kind in (WHOLE, *SLICES)}
    for row in measured:
        if row["signature"] in works and row["device_type"] in devices:
            work = works[row["signature"]]
            time = modelled_time(work, devices[row["device_type"]])
            yield _compared(name, row, work, time.bound, time.median_us, time.low_us, time.high_us)


def _looked_up(
    name: str,
    works: Mapping[str, Work],
    measured: list[dict[str, Any]],
    rows: Mapping[tuple[str, str], TimeRow],
) -> Iterable[Compared]:
    for row in measured:
        found = rows.get((row["device_type"], row["signature"]))
        if found is not None:
            work = works[row["signature"]]
            yield _compared(name, row, work, "", found.median_us, found.low_us, found.high_us)


def _compared(
    name: str, row: Mapping[str, Any], work: Work, bound: str, time_us: float, low_us: float, high_us: float
) -> Compared:
    kind = type(work).__name__.lower()
    if isinstance(work, Attention):
        kind = f"attention, {work.phase}"
    elif isinstance(work, Product) and work.convolution:
        kind = "convolution"
    return Compared(
        trace=name,
        device_type=row["device_type"],
        kind=kind,
        bound=bound,
        measured_us=row["median_us"],
        ratio=time_us / row["median_us"],
        inside=low_us <= row["median_us"] <= high_us,
    )


def _median(of: Iterable[Compared]) -> float | None:
    errors = [abs(each.ratio - 1) for each in of]
    return rounded(np.median(errors)) if errors else None


def _grouped(of: Iterable[Compared], by: str) -> dict[str, Any]:
    groups: dict[str, list[Compared]] = {}
    for each in of:
        groups.setdefault(getattr(each, by), []).append(each)
        groups.setdefault("all", []).append(each)
    return {name: _facts(each) for name, each in sorted(groups.items())}


def _facts(of: list[Compared]) -> dict[str, Any]:
    errors = [abs(each.ratio - 1) for each in of]
    return {
        "kernels": len(of),
        "median": rounded(np.median(errors)),
        "mean": rounded(np.mean(errors)),
        "ratio": rounded(np.median([each.ratio for each in of])),
        "inside": rounded(np.mean([each.inside for each in of])),
    }
