"""Memory-bound kernels as modelled for the H200, against measurements kept in ``fixtures/profiles``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predictor.accuracy import rounded
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.predict import modelled_time
from tessera_core.profile.work import Streaming, work_of
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_formats.profile import read_profile

PROFILES, TRACES = Path("fixtures/profiles"), Path("fixtures/captures")
DEVICE_TYPE = "h200-sxm"


def memory_bound() -> dict[str, Any]:
    """Median error over measured kernels without a product, attention, experts or scan; none measured: None."""
    profiles = sorted(PROFILES.glob("*.profile.arrow"))
    traces = {
        trace.digest: trace
        for path in sorted(TRACES.glob("*.trace"))
        if profiles
        for trace in [load_trace(path)]
    }
    device = ModelledDevice.of(DEVICE_TYPE)
    errors, inside = [], []
    for path in profiles:
        profile = read_profile(path)
        trace = traces.get(profile.header["program_digest"])
        if trace is None:
            continue
        works = _streaming(trace)
        for row in profile.table.to_pylist():
            measured = row["source"] == "measured" and row["condition"] == "alone"
            if measured and row["device_type"] == DEVICE_TYPE and row["signature"] in works:
                time = modelled_time(works[row["signature"]], device)
                errors.append(abs(time.median_us / row["median_us"] - 1))
                inside.append(time.low_us <= row["median_us"] <= time.high_us)
    if not errors:
        return {"kernels": 0, "median": None, "inside": None}
    return {
        "kernels": len(errors),
        "median": rounded(np.median(errors)),
        "mean": rounded(np.mean(errors)),
        "inside": rounded(np.mean(inside)),
    }


def _streaming(trace: Trace) -> dict[str, Streaming]:
    found: dict[str, Streaming] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            if kernel.signature not in found:
                work = work_of(trace, program, kernel)
                if isinstance(work, Streaming) and kernel.kind != "collective":
                    found[kernel.signature] = work
    return found
