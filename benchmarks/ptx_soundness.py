"""The analysis of PTX against what oracles saw: no missed access, no false must-write, and how much wider.

CPU oracles: each launch of the suite, seen by Triton's interpreter or the PTX emulator (``fixtures/ptx``), is compared
with the analysis of every module that holds its kernel. GPU: what instrumented PTX saw on the recorded machine is
compared in the same way, and the poison test's outcome is carried over. "Equal" means equal to an oracle's set.
"""

from __future__ import annotations

import json
import lzma
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import Bar, report
from fixtures.ptx import archive
from fixtures.ptx.archive import MODES, StoredLaunch
from tessera_core.ptx.analysis import LaunchAnalysis, LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module
from tessera_core.validate.poison import mark
from tessera_formats.trace import read_trace

GPU = archive.HERE / "gpu.json.xz"
CPU_LAUNCHES_BAR, KERNELS_BAR, GPU_LAUNCHES_BAR = 300, 60, 100
EQUAL_SHARE_BAR, WIDTH_BAR = 0.97, 1.01
SECONDS_LIMIT = 4.0  # of processor time for one launch, of which most take a few milliseconds
NAMED = 30  # findings listed by name

Marks = npt.NDArray[np.bool_]
Seen = Mapping[str, Mapping[int, list[int]]]


@dataclass(slots=True)
class Tally:
    """Comparisons of one group of launches. ``missed`` and ``false_must`` count accesses (a buffer and a mode of a
    launch), the other fields launches or bytes as named."""

    launches: set[tuple[str, int]] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    comparisons: int = 0
    equal: int = 0
    missed: list[str] = field(default_factory=list)
    false_must: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    beyond_base: list[str] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Counts, and the first findings by name."""
        return {
            "launches": len(self.launches),
            "kernels": len(self.kernels),
            "launches_times_modules": self.comparisons,
            "equal_share": round(self.equal / max(self.comparisons, 1), 4),
            "median_claimed_over_observed": self.width(),
            "missed": self.missed[:NAMED],
            "false_must_writes": self.false_must[:NAMED],
            "not_equal": self.unequal[:NAMED],
            "wider_than_the_allocation": self.beyond_base[:NAMED],
        }

    def width(self) -> float:
        """Median of claimed over observed bytes, an item per access."""
        return round(statistics.median(self.widths), 4) if self.widths else 0.0


def shape_of(launch: StoredLaunch) -> LaunchShape:
    """A stored launch as the analysis takes it."""
    return LaunchShape(
        entry=launch.entry,
        grid=launch.grid,
        block=launch.block,
        shared_bytes=launch.shared_bytes,
        parameters=launch.parameters,
        relocations=tuple(Relocation(*relocation) for relocation in launch.relocations),
    )


def compare(tally: Tally, name: str, analysis: LaunchAnalysis, sizes: Mapping[int, int], seen: Seen) -> None:
    """Count one launch: claims against what was seen, buffer by buffer and mode by mode."""
    tally.comparisons += 1
    equal = True
    for mode in MODES:
        for buffer, size in sizes.items():
            may, must, observed = (np.zeros(size, dtype=np.bool_) for _ in range(3))
            for access in analysis.accesses:
                if access.buffer == buffer and access.mode == mode:
                    _claim(may, access.boxes)
                    if access.must:
                        _claim(must, access.boxes)
            runs = seen[mode].get(buffer, [])
            for low, high in zip(runs[::2], runs[1::2], strict=True):
                observed[low:high] = True
            what = f"{name}: {mode} of buffer {buffer}"
            if (observed & ~may).any():
                tally.missed.append(what)
            if mode == "write" and (must & ~observed).any():
                tally.false_must.append(what)
            equal &= bool((may == observed).all())
            if observed.any():
                tally.widths.append(int(may.sum()) / int(observed.sum()))
    tally.equal += equal
    if not equal:
        tally.unequal.append(name)


def _claim(flags: Marks, boxes: Iterable[Any] | None) -> None:
    if boxes is None:
        flags[:] = True
        return
    for box in boxes:
        mark(flags, box)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after so much processor time."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def cpu() -> tuple[dict[str, Tally], list[str]]:
    """Tallies by group, and modules that can't be analysed at all."""
    found = {
        group: Tally()
        for group in ("triton", "triton data-dependent", "cuda", "cuda data-dependent", "tensor memory")
    }
    failed: list[str] = []
    parsed: dict[str, Module] = {}  # the last module only: the launches of one follow each other
    for launch in archive.launches():
        if launch.module not in parsed:
            parsed = {launch.module: parse_module(archive.modules()[launch.module].text, launch.module)}
        seen = archive.observed()[launch.kernel][launch.launch]
        numbers = {name: index for index, name in enumerate(launch.buffers)}
        runs = {mode: {numbers[name]: r for name, r in seen[mode].items()} for mode in MODES}
        sizes = {b: size for b, size in launch.sizes().items() if list(launch.buffers)[b] != "scratch"}
        group = "triton" if launch.triton else "cuda"
        if launch.data_dependent:
            group += " data-dependent"
        elif launch.descriptors or "scratch" in launch.buffers:
            group = "tensor memory"
        name = f"{launch.module} {launch.entry} launch {launch.launch}"
        try:
            with limited(SECONDS_LIMIT):
                analysis = analyse_launch(parsed[launch.module], shape_of(launch), launch.sizes())
        except Exception as problem:
            failed.append(f"{name}: {type(problem).__name__}: {problem}")
            continue
        tally = found[group]
        tally.launches.add((launch.kernel, launch.launch))
        tally.kernels.add(launch.kernel)
        compare(tally, name, analysis, sizes, runs)
        anywhere = next((access for access in analysis.accesses if access.precision == "fallback"), None)
        if launch.data_dependent and anywhere is not None and not _loads_pointers(launch):
            tally.beyond_base.append(f"{name}: {anywhere.reason} (line {anywhere.line})")
    return found, failed


def _loads_pointers(launch: StoredLaunch) -> bool:
    """Whether a buffer of the launch holds addresses: then the base itself is loaded."""
    arrays = archive.suite()["kernels"][launch.kernel]["launches"][launch.launch]["arrays"]
    return any(array["fill"] == "pointers" for array in arrays.values())


def gpu(recorded: Mapping[str, Any]) -> tuple[Tally, dict[str, Any]]:
    """Instrumented launches of the record against the analysis of today, and the poison tests' outcomes."""
    tally = Tally()
    by_key = {(launch.module, launch.kernel, launch.launch): launch for launch in archive.launches()}
    parsed: dict[str, Module] = {}
    poisoned = refuted = 0
    for entry in recorded["suite"]:
        launch = by_key.get((entry["module"], entry["kernel"], entry["launch"]))
        if "poison" in entry:
            outcome = entry["poison"]
            ordered = launch is None or not archive.order_matters(launch)
            poisoned += 1
            refuted += not outcome["holds"] if ordered else bool(outcome["lost_canaries"])
        if launch is None or entry["unseen"]:
            continue
        if launch.module not in parsed:
            parsed = {launch.module: parse_module(archive.modules()[launch.module].text, launch.module)}
        analysis = analyse_launch(parsed[launch.module], shape_of(launch), launch.sizes())
        _gpu_compare(
            tally, f"{launch.module} {launch.entry} launch {launch.launch}", analysis, launch.sizes(), entry
        )
        tally.launches.add((f"{launch.module} {launch.kernel}", launch.launch))
        tally.kernels.add(launch.kernel)
    captured = sum(1 for _ in _captured(tally, recorded["captured"]))
    validated = [
        {k: v for k, v in facts.items() if not isinstance(v, list)} for facts in recorded["validated"]
    ]
    return tally, {
        "captured_launches": captured,
        "poisoned_launches": poisoned,
        "refuted": refuted,
        "validated": validated,
        "machine": recorded.get("machine", {}),
        "problems": recorded["problems"],
    }


def _gpu_compare(
    tally: Tally, name: str, analysis: LaunchAnalysis, sizes: Mapping[int, int], entry: Mapping[str, Any]
) -> None:
    seen = {
        mode: {int(buffer): _within(runs, sizes[int(buffer)]) for buffer, runs in entry["seen"][mode].items()}
        for mode in MODES
    }
    compare(tally, name, analysis, sizes, seen)


def _within(runs: list[int], size: int) -> list[int]:
    return [
        edge
        for pair in zip(runs[::2], runs[1::2], strict=True)
        if pair[0] < size
        for edge in (pair[0], min(pair[1], size))
    ]


def _captured(tally: Tally, entries: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Compare captured launches; each one yields once."""
    traces: dict[str, tuple[Any, dict[Any, Any], dict[str, Module], dict[int, int]]] = {}
    for entry in entries:
        name, target = entry["trace"], entry["target"]
        if name not in traces:
            bundle = read_trace(Path(f"fixtures/captures/{name}.trace"))
            rows = bundle.table(f"targets/{target}/launches").to_pylist()
            modules = bundle.table(f"targets/{target}/modules").to_pylist()
            traces[name] = (
                bundle,
                {(row["program"], row["kernel"], row["launch"]): row for row in rows},
                {
                    m["module"]: parse_module(m["text"], m["module"])
                    for m in modules
                    if m["language"] == "ptx"
                },
                {row["buffer"]: row["bytes"] for row in bundle.table("buffers").to_pylist()},
            )
        _, launches, parsed, buffers = traces[name]
        row = launches[entry["program"], entry["kernel"], entry["launch"]]
        if entry["unseen"] or row["module"] not in parsed:
            continue
        x, y, z = row["grid"]
        bx, by, bz = row["block"]
        shape = LaunchShape(
            entry=row["function"],
            grid=(x, y, z),
            block=(bx, by, bz),
            shared_bytes=row["shared_bytes"],
            parameters=row["parameters"],
            relocations=tuple(
                Relocation(r["offset"], r["buffer"], r["byte_offset"]) for r in row["relocations"]
            ),
        )
        sizes = {r.buffer: buffers[r.buffer] for r in shape.relocations}
        label = f"{name} program {entry['program']} kernel {entry['kernel']} launch {entry['launch']}"
        others = [b for mode in MODES for b in entry["seen"][mode] if int(b) not in sizes]
        if others:
            tally.missed.append(f"{label}: buffers {others} that the launch is not given")
            continue
        _gpu_compare(tally, label, analyse_launch(parsed[row["module"]], shape, sizes), sizes, entry)
        tally.launches.add((label, entry["launch"]))
        tally.kernels.add(row["function"])
        yield


def main() -> int:
    """Compare everything; 0 where every bar holds."""
    started = time.perf_counter()
    tallies, failed = cpu()
    launches = {launch for tally in tallies.values() for launch in tally.launches}
    kernels = {kernel for tally in tallies.values() for kernel in tally.kernels}
    results: dict[str, Any] = {
        "cpu": {group: tally.as_json() for group, tally in tallies.items()},
        "not_analysed": failed[:NAMED],
    }
    plain = tallies["triton"]
    equal = plain.equal / max(plain.comparisons, 1)
    missed = sum(len(tally.missed) for tally in tallies.values())
    false_must = sum(len(tally.false_must) for tally in tallies.values())
    beyond = sum(len(tally.beyond_base) for tally in tallies.values())
    bars = [
        _least("launches observed on CPU oracles", len(launches), CPU_LAUNCHES_BAR),
        _least("kernels observed on CPU oracles", len(kernels), KERNELS_BAR),
        _none("launches that can't be analysed", len(failed)),
        _none("missed accesses", missed),
        _none("false must-writes", false_must),
        _least(
            "Triton without data-dependent addresses: share equal to the oracle",
            round(equal, 4),
            EQUAL_SHARE_BAR,
        ),
        _most(
            "Triton without data-dependent addresses: median claimed over observed", plain.width(), WIDTH_BAR
        ),
        _none("data-dependent launches wider than the containing allocation", beyond),
    ]
    if GPU.exists():
        recorded = json.loads(lzma.decompress(GPU.read_bytes()))
        tally, about = gpu(recorded)
        results["gpu"] = {**tally.as_json(), **about}
        refuted = about["refuted"] + sum(facts["kernels_refuted"] for facts in about["validated"])
        bars += [
            _least("launches observed on the GPU", tally.comparisons, GPU_LAUNCHES_BAR),
            _none("missed accesses on the GPU", len(tally.missed)),
            _none("false must-writes on the GPU", len(tally.false_must)),
            _none("claims that the poison test refutes", refuted),
        ]
    results["seconds"] = round(time.perf_counter() - started, 1)
    return report("ptx_soundness", results, bars)


def _bar(sign: str, holds: Callable[[float, float], bool]) -> Callable[[str, float, float], Bar]:
    return lambda name, value, bar: Bar(name, value, f"{sign} {bar}", holds(value, bar))


_least = _bar(">=", lambda value, bar: value >= bar)
_most = _bar("<=", lambda value, bar: value <= bar)


def _none(name: str, value: int) -> Bar:
    return Bar(name, value, "= 0", value == 0)


if __name__ == "__main__":
    sys.exit(main())
