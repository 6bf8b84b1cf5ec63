"""The PTX analyser's speed on one core: parsing, analysis of the suite's launches, and a Llama-3-8B-shaped iteration.

The suite is every module stored in ``fixtures/ptx``. The iteration is the captured decode step with 4 layers of
``fixtures/captures`` with its layers repeated to the model's 32, each launch on buffers of its own. Cold: modules are
parsed and nothing is remembered yet, but launches of equal signature are analysed once; warm: the same launches again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import Bar, report
from benchmarks.ptx_soundness import limited, shape_of
from fixtures.ptx import archive
from tessera_core.ptx.analysis import LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module
from tessera_formats.trace import read_trace

CAPTURE = Path("fixtures/captures/llama-3-8b-4-layers.trace")
LAYERS, TRACED_LAYERS = 32, 4
MODULES_BAR, KERNELS_BAR, PARSE_BAR_MB_PER_S = 200, 60, 3.0
LAUNCHES_BAR, COLD_BAR_SECONDS, WARM_BAR_SECONDS = 500, 5.0, 1.0
LAUNCH_LIMIT_SECONDS = 4.0


def suite() -> tuple[dict[str, Any], int]:
    """Speeds over the stored modules and their launches, and how many launches took too long."""
    stored = archive.modules()
    total_mb = sum(len(module.text) for module in stored.values()) / 1e6
    began = time.process_time()
    parsed = {name: parse_module(module.text, name) for name, module in stored.items()}
    parsing = time.process_time() - began
    launches = [(parsed[launch.module], shape_of(launch), launch.sizes()) for launch in archive.launches()]
    cold, late = _timed(launches)
    warm, _ = _timed([launch for launch in launches if id(launch) not in late])
    return {
        "modules": len(stored),
        "kernels": len(archive.suite()["kernels"]),
        "megabytes": round(total_mb, 2),
        "parsed_mb_per_s": round(total_mb / parsing, 1),
        "analysed_mb_per_s": round(total_mb / (parsing + cold), 2),
        "launches": len(launches),
        "launches_per_s_cold": round((len(launches) - len(late)) / cold),
        "launches_per_s_warm": round((len(launches) - len(late)) / warm),
        "assemblers": sorted({module.ptxas for module in stored.values()}),
    }, len(late)


def _timed(launches: Sequence[tuple[Module, LaunchShape, dict[int, int]]]) -> tuple[float, set[int]]:
    """Seconds of processor time for launches that end in time, and the identities of those that don't."""
    seconds = 0.0
    late: set[int] = set()
    for launch in launches:
        began = time.process_time()
        try:
            with limited(LAUNCH_LIMIT_SECONDS):
                analyse_launch(*launch)
        except TimeoutError:
            late.add(id(launch))
        else:
            seconds += time.process_time() - began
    return seconds, late


def iteration() -> tuple[dict[str, str], list[tuple[str, LaunchShape, dict[int, int]]]]:
    """Texts by module, and the launches with PTX of one decode step as (module, shape, sizes)."""
    bundle = read_trace(CAPTURE)
    target = bundle.targets()[0]
    texts = {
        row["module"]: row["text"]
        for row in bundle.table(f"targets/{target}/modules").to_pylist()
        if row["language"] == "ptx"
    }
    programs = {row["program"]: row["phase"] for row in bundle.table("programs").to_pylist()}
    sizes = {row["buffer"]: row["bytes"] for row in bundle.table("buffers").to_pylist()}
    rows = [
        row
        for row in bundle.table(f"targets/{target}/launches").to_pylist()
        if programs[row["program"]] == "decode" and row["module"] in texts
    ]
    found: list[tuple[str, LaunchShape, dict[int, int]]] = []
    for copy in range(LAYERS // TRACED_LAYERS):
        for row in rows:
            buffers = {r["buffer"]: r["buffer"] + copy * len(sizes) for r in row["relocations"]}
            shape = LaunchShape(
                entry=row["function"],
                grid=_three(row["grid"]),
                block=_three(row["block"]),
                shared_bytes=row["shared_bytes"],
                parameters=row["parameters"],
                relocations=tuple(
                    Relocation(r["offset"], buffers[r["buffer"]], r["byte_offset"])
                    for r in row["relocations"]
                ),
            )
            found.append((row["module"], shape, {new: sizes[old] for old, new in buffers.items()}))
    return texts, found


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = extents
    return x, y, z


def llama() -> dict[str, Any]:
    """Seconds for the iteration, cold and warm, the texts' parsing included when cold."""
    texts, launches = iteration()
    repeats = -(-LAUNCHES_BAR // len(launches))
    began = time.process_time()
    parsed = {name: parse_module(text, name) for name, text in texts.items()}
    for name, shape, sizes in launches * repeats:
        analyse_launch(parsed[name], shape, sizes)
    cold = time.process_time() - began
    began = time.process_time()
    for name, shape, sizes in launches * repeats:
        analyse_launch(parsed[name], shape, sizes)
    return {
        "launches": len(launches) * repeats,
        "modules": len(texts),
        "seconds_cold": round(cold, 3),
        "seconds_warm": round(time.process_time() - began, 3),
    }


def main() -> int:
    """Measure everything; 0 where every bar holds."""
    whole = llama()  # first: nothing is remembered yet
    found, late = suite()
    parsed = found["parsed_mb_per_s"]
    cold, warm = whole["seconds_cold"], whole["seconds_warm"]
    bars = [
        Bar("modules parsed", found["modules"], f">= {MODULES_BAR}", found["modules"] >= MODULES_BAR),
        Bar("kernels", found["kernels"], f">= {KERNELS_BAR}", found["kernels"] >= KERNELS_BAR),
        Bar("MB/s parsed", parsed, f">= {PARSE_BAR_MB_PER_S}", parsed >= PARSE_BAR_MB_PER_S),
        Bar(f"launches that take over {LAUNCH_LIMIT_SECONDS} s", late, "= 0", late == 0),
        Bar(
            "launches of the iteration",
            whole["launches"],
            f">= {LAUNCHES_BAR}",
            whole["launches"] >= LAUNCHES_BAR,
        ),
        Bar("seconds for the iteration, cold", cold, f"<= {COLD_BAR_SECONDS}", cold <= COLD_BAR_SECONDS),
        Bar("seconds for the iteration, warm", warm, f"<= {WARM_BAR_SECONDS}", warm <= WARM_BAR_SECONDS),
    ]
    return report("ptx", {"suite": found, "iteration": whole}, bars)


if __name__ == "__main__":
    sys.exit(main())
