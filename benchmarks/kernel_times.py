"""Times of all kernels of the captured fixtures on a GPU and on disjoint slices of it, alone and beside a copy.

``python -m benchmarks.kernel_times --out FOLDER [--only NAME...] [--seconds S] [--compare ROTATION...] [--prefixes]``.
Every trace has a process of its own: all compile at once, then they measure one after another, each alone on the GPU.
Kept: a profile artifact per trace, and per trace what was found of each kernel as JSON. All is measured twice, the
second time from fresh graphs. Bars: the two agree, kernels add up to whole iterations, slices are disjoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks import Bar, report
from tessera_core.devices.cuda import CudaDevice, multiprocessors_of
from tessera_core.profile.measure.cuda import (
    Found,
    described,
    measure,
    open_labs,
    prefixes,
    rows_of,
)
from tessera_core.profile.measure.cuda_copies import Rotation
from tessera_core.profile.measure.cuda_lab import CudaLab
from tessera_core.profile.measure.cuda_links import measure_copies
from tessera_core.profile.measure.cuda_slices import slowdowns
from tessera_core.profile.measure.cuda_source import Source
from tessera_core.profile.times import DeviceRow, TimeRow, fields_of
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_core.trace.capture.stage import machine_facts
from tessera_formats.profile import TIMES, write_profile

CAPTURES = Path(__file__).parent.parent / "fixtures/captures"
TYPE = "h200-sxm"
SHARES = (96, 36)
NEAR = 0.03
"""Times of one thing, found twice or as a sum of its parts, may differ by so much."""
SHARE_NEAR = 0.95
"""Share of kernels that must agree so well; single ones of two or three microseconds wander more."""
DISJOINT = 1.6


def main() -> int:
    """Measure, keep the artifacts, print what was found."""
    names = sorted(path.stem for path in CAPTURES.glob("*.trace"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_times")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--out", type=Path, required=True, help="folder that keeps profiles and findings")
    parser.add_argument("--seconds", type=float, default=6.0, help="of sampling, for each device and pass")
    parser.add_argument(
        "--compare", nargs="*", default=[], choices=("weights", "none"), help="other rotations"
    )
    parser.add_argument("--prefixes", action="store_true", help="also what each kernel adds where it runs")
    parser.add_argument(
        "--alone", action="store_true", help="measure one trace, when told to on standard input"
    )
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernel_times: needs a CUDA device", file=sys.stderr)
        return 1
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.alone:
        _measure_one(chosen.only[0], chosen.out, chosen.seconds, chosen.compare, chosen.prefixes)
        return 0
    found = _measure_all(chosen.only, chosen)
    build = machine_facts("cuda:0", compiled=True)
    results: dict[str, Any] = {"build": build, "copies": _copies()}
    results |= {name: _summary(facts) for name, facts in found.items()}
    bars = [bar for name, facts in found.items() for bar in _bars(name, facts)]
    lost = [name for name in chosen.only if name not in found]
    bars += [Bar(f"{name}: was measured", "failed", "= done", False) for name in lost]
    return report("kernel_times", results, bars, f"{build['device']}, driver {build['driver']}")


def _measure_all(names: Sequence[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """Start a process per trace, let them measure in turn; what each found, without those that failed."""
    children: list[tuple[str, subprocess.Popen[str], IO[str]]] = []
    for name in names:
        said = (chosen.out / f"{name}.txt").open("w")
        command = [sys.executable, "-m", "benchmarks.kernel_times", "--alone", "--only", name]
        command += ["--out", str(chosen.out), "--seconds", str(chosen.seconds), "--compare", *chosen.compare]
        command += ["--prefixes"] if chosen.prefixes else []
        pipe = subprocess.PIPE
        children.append(
            (name, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True), said)
        )
    started = time.perf_counter()
    for _, child, _ in children:
        assert child.stdout is not None
        while child.stdout.readline() not in (
            "compiled\n",
            "",
        ):  # it has ended where there is nothing to read
            pass
    print(f"compiled after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    found: dict[str, Any] = {}
    failures = 0
    for name, child, said in children:
        child.communicate("go\n" if child.poll() is None else None)
        said.close()
        print(f"{name}: done after {time.perf_counter() - started:.0f} s", file=sys.stderr)
        answer = chosen.out / f"{name}.json"
        if child.returncode == 0 and answer.is_file():
            found[name] = json.loads(answer.read_text())
        else:
            print((chosen.out / f"{name}.txt").read_text()[-1500:], file=sys.stderr)
            failures += 1
            if failures > len(found) + 1:
                print("most fail, so the rest is not tried", file=sys.stderr)
                break
    for _, child, _ in children:
        if child.poll() is None:
            child.kill()
    return found


def _measure_one(name: str, out: Path, seconds: float, compared: Sequence[Rotation], added: bool) -> None:
    """Compile, wait to be told, measure on all devices, keep the profile and the findings."""
    trace = load_trace(CAPTURES / f"{name}.trace")
    started = time.perf_counter()
    (lab,) = open_labs(CudaDevice(index=0))
    source = Source.of(trace, lab.device, trusted=True)
    source.compile(lab, _say)
    compiled = time.perf_counter() - started
    print("compiled", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    (whole,) = open_labs(CudaDevice(index=0))
    slices = open_labs(CudaDevice(index=0, shares=SHARES))
    facts: dict[str, Any] = {
        "compile_seconds": round(compiled, 1),
        "multiprocessors": multiprocessors_of(0),
        "slowdown_of_products_beside_products": [round(value, 3) for value in slowdowns(slices)],
    }
    rows: list[TimeRow] = []
    devices = []
    for lab, other in ((whole, None), (slices[0], slices[1]), (slices[1], slices[0])):
        own, device, more = _on_device(source, lab, other, seconds)
        rows += more
        devices.append(device)
        facts[lab.lane.device.name] = own
        (out / f"{name}.json").write_text(json.dumps(facts))  # so that something is left of a run cut short
    for rotation in compared:
        found = measure(source, whole, None, seconds=seconds, rotation=rotation, progress=_say)
        facts[whole.lane.device.name][f"rotating {rotation}"] = _sums(trace, found)
    if added:
        facts[whole.lane.device.name]["prefixes"] = {
            program.name: [
                [kernel.signature[:16], round(us, 3)]
                for kernel, us in zip(program.kernels, prefixes(source, whole, program, seconds))
            ]
            for program in trace.programs
        }
        (out / f"{name}.json").write_text(json.dumps(facts))
    facts["unmeasured"] = source.unmeasured
    facts["seconds"] = round(time.perf_counter() - started, 1)
    header = {
        "program_digest": trace.digest,
        "links": [],
        "devices": [fields_of(device) for device in devices],
    }
    write_profile(out / f"{name}.profile.arrow", header, TIMES.build([fields_of(row) for row in rows]))
    (out / f"{name}.json").write_text(json.dumps(facts))


def _on_device(
    source: Source, lab: CudaLab, other: CudaLab | None, seconds: float
) -> tuple[dict[str, Any], DeviceRow, list[TimeRow]]:
    """Findings, rows and the device's row."""
    device = lab.lane.device
    began = time.perf_counter()
    first = measure(source, lab, other, seconds=seconds, progress=_say)
    middle = time.perf_counter()
    again = measure(source, lab, None, seconds=seconds / 2, progress=_say)
    kind = TYPE if device.multiprocessors is None else f"{TYPE}/sm={device.multiprocessors}"
    load = "" if other is None else f"the same program's iterations on {other.lane.device.name}"
    rows = list(rows_of(source, first, kind, described(device), load))
    overhead = lab.launch_us()
    facts = {
        "graph_us": round(lab.fixed_us, 3),
        "least_launch_us": round(lab.least_us, 3),
        "host_launch_us": round(overhead, 3),
        "seconds": [round(middle - began, 1), round(time.perf_counter() - middle, 1)],
        "programs": _sums(source.trace, first),
        "programs_again": _sums(source.trace, again),
        "kernels": _times(first),
        "kernels_again": _times(again),
    }
    row = DeviceRow(
        device_type=kind,
        hardware=described(device),
        threads=0,
        overhead_us=overhead,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        source="measured",
    )
    return facts, row, rows


def _sums(trace: Trace, found: Found) -> dict[str, Any]:
    """Per program and condition: the sum of its kernels, its whole iteration, and their ratio."""
    rows: dict[str, Any] = {}
    for (number, condition), whole in found.whole().items():
        program = trace.programs[number]
        total = found.total_us(program, condition)
        if total is not None:
            rows[f"{program.name} {condition}"] = {
                "sum_us": round(total, 2),
                "whole_us": round(whole.median_us, 2),
                "ratio": round(total / whole.median_us, 4),
            }
    return rows


def _times(found: Found) -> dict[str, Any]:
    """Per condition and signature: median, half interval over median, blocks, launches of each."""
    kernels = {kernel.signature: kernel for program in found.trace.programs for kernel in program.kernels}
    rows: dict[str, Any] = {}
    for condition, times in found.times.items():
        rows[condition] = {
            signature[:16]: {
                "name": kernels[signature].name,
                "us": round(value.median_us, 4),
                "half": round((value.interval_us[1] - value.interval_us[0]) / 2 / value.median_us, 4),
                "blocks": len(value.times_us),
                "launches": value.launches,
            }
            for signature, value in times.items()
            if signature in kernels
        }
    return rows


def _summary(facts: dict[str, Any]) -> dict[str, Any]:
    """Findings without single kernels."""
    kept = {key: value for key, value in facts.items() if not key.startswith("cuda:")}
    for place, own in _places(facts):
        kept[place] = {
            key: value for key, value in own.items() if key != "prefixes" and not key.startswith("kernels")
        }
        kept[place]["again"] = _again(own)
        if own["kernels"].get("copies"):
            alone, copies = own["kernels"]["alone"], own["kernels"]["copies"]
            kept[place]["median_inflation_beside_copies"] = round(
                statistics.median(copies[key]["us"] / alone[key]["us"] for key in copies), 3
            )
    return kept


def _again(own: dict[str, Any]) -> dict[str, Any]:
    """How far medians of the second pass lie from those of the first."""
    first, second = own["kernels"]["alone"], own["kernels_again"]["alone"]
    off = {key: abs(second[key]["us"] / first[key]["us"] - 1) for key in first if key in second}
    worst = sorted(off, key=lambda key: -off[key])[:3]
    return {
        "signatures": len(off),
        "near": sum(value <= NEAR for value in off.values()),
        "median_deviation": round(statistics.median(off.values()), 4),
        "worst": [[first[key]["name"], first[key]["us"], round(off[key], 4)] for key in worst],
    }


def _copies() -> dict[str, Any]:
    """Copies within the GPU, to the host and back."""
    ways = (("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0"))
    links = [measure_copies(source, destination, (source, destination), 1.0) for source, destination in ways]
    return {
        f"{link.source} to {link.destination}": {
            "latency_us": round(link.latency_us, 2),
            "gbyte_per_s": round(link.gbit_per_s / 8, 1),
            "residual": round(link.residual, 3),
            "detail": link.detail,
        }
        for link in links
    }


def _places(facts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(key, value) for key, value in facts.items() if key.startswith("cuda:")]


def _bars(name: str, facts: dict[str, Any]) -> list[Bar]:
    slowest = max(facts["slowdown_of_products_beside_products"])
    bars = [
        Bar(f"{name}: products beside products, slower by", slowest, f"<= {DISJOINT}", slowest <= DISJOINT)
    ]
    for place, own in _places(facts):
        again = _again(own)
        share = round(again["near"] / again["signatures"], 4)
        middle = again["median_deviation"]
        bars += [
            Bar(
                f"{name} {place}: share of medians within {NEAR:.0%} when measured again",
                share,
                f">= {SHARE_NEAR}",
                share >= SHARE_NEAR,
            ),
            Bar(f"{name} {place}: median deviation", middle, f"<= {NEAR}", middle <= NEAR),
        ]
        for program, sums in own["programs"].items():
            if not program.endswith(" alone"):
                continue  # a single iteration and a kernel meet other moments of what runs beside them
            far = abs(sums["ratio"] - 1)
            bars.append(
                Bar(
                    f"{name} {place} {program}: sum of kernels over the whole",
                    sums["ratio"],
                    f"{1 - NEAR:g} to {1 + NEAR:g}",
                    far <= NEAR,
                )
            )
    return bars


def _say(text: str) -> None:
    print(f"{time.perf_counter():.1f} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
