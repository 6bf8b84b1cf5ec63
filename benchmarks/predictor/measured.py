"""Kernels as modelled for the H200, against measurements of it kept in ``fixtures/profiles``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predictor.accuracy import rounded
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.predict import modelled_time
from tessera_core.profile.operators import work_of
from tessera_core.profile.work import Work
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_formats.profile import read_profile

PROFILES, TRACES = Path("fixtures/profiles"), Path("fixtures/captures")
DEVICE_TYPE = "h200-sxm"


def memory_bound() -> dict[str, Any]:
    """Errors over measured kernels by what bounds them, and the median of those bounded by memory; else None."""
    profiles = sorted(PROFILES.glob("*.profile.arrow"))
    traces = [load_trace(path) for path in sorted(TRACES.glob("*.trace"))] if profiles else []
    works = {trace.digest: _works(trace) for trace in traces}
    device = ModelledDevice.of(DEVICE_TYPE)
    found: dict[str, list[tuple[float, bool]]] = {}
    for path in profiles:
        profile = read_profile(path)
        known = works.get(profile.header["program_digest"], {})
        for row in profile.table.to_pylist():
            wanted = (row["source"], row["condition"], row["device_type"]) == (
                "measured",
                "alone",
                DEVICE_TYPE,
            )
            if wanted and row["signature"] in known and row["cache"] == "sequence":
                time = modelled_time(known[row["signature"]], device)
                error = abs(time.median_us / row["median_us"] - 1)
                found.setdefault(time.bound, []).append(
                    (error, time.low_us <= row["median_us"] <= time.high_us)
                )
    return {
        "median": _facts(found["memory"])["median"] if "memory" in found else None,
        "by_bound": {bound: _facts(pairs) for bound, pairs in sorted(found.items())},
    }


def _facts(pairs: list[tuple[float, bool]]) -> dict[str, Any]:
    errors = [error for error, _ in pairs]
    return {
        "kernels": len(pairs),
        "median": rounded(np.median(errors)),
        "mean": rounded(np.mean(errors)),
        "inside": rounded(np.mean([inside for _, inside in pairs])),
    }


def _works(trace: Trace) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            if kernel.signature not in found and kernel.kind != "collective":
                found[kernel.signature] = work_of(trace, program, kernel)
    return found
