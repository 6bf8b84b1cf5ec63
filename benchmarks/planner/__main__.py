"""``python -m benchmarks.planner [--bars] [--artifacts FOLDER] [MODEL or generated ...]``: see the package.

Seconds count from artifacts that are read, and before the cost model is built, to the placement; imports are made
before. Bars are held to the process's seconds, since other work on the machine lengthens those on the clock; both
are in the record, with the load average.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import highspy  # noqa: F401  imported before the clock starts
import scipy.optimize
import scipy.sparse.csgraph  # noqa: F401

from benchmarks import Bar, report
from benchmarks.planner.cells import Limits, repeated
from benchmarks.planner.generated import generated
from benchmarks.planner.inputs import BETWEEN_GBIT_PER_S, MODELS, SHAPES, Shape, load, make
from tessera_core.plan.problem import Problem
from tessera_core.profile.catalogue import catalogue

GENERATED = "generated"
KERNELS = 1500
LARGE_KERNELS = 1_400
"""Kernels from which a model is one of about 1,500."""
PAIR_GAP, MANY_GAP, LIMITED_GAP = 0.01, 0.07, 0.03
PAIR_SECONDS, LARGE_PAIR_SECONDS, MANY_SECONDS, LIMITED_SECONDS = 3.0, 1.0, 5.0, 10.0
MANY = 16

Maker = Callable[[int], Problem]


def main() -> int:
    """Measure every cell and compare with the bars."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner")
    parser.add_argument("subjects", nargs="*", default=[*MODELS, GENERATED])
    parser.add_argument("--artifacts", type=Path, help="where artifacts are kept; else a temporary folder")
    parser.add_argument("--devices", type=int, nargs="*", help="clusters of so many devices only")
    parser.add_argument("--bars", action="store_true", help="only what a bar is held to")
    asked = parser.parse_args()
    shapes = [shape for shape in SHAPES if not asked.devices or shape.devices in asked.devices]
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.artifacts or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, Any] = {}
        bars: list[Bar] = []
        for name in asked.subjects:
            for shape, gbit_per_s, maker in _problems(folder, name, shapes):
                for limits in get_args(Limits):
                    for cell, gap, most_s in _targets(shape, limits):
                        if asked.bars and not _held(shape, limits, most_s):
                            continue
                        title = ", ".join((name, shape.name, f"{gbit_per_s} Gb/s", cell))
                        results[title] = found = repeated(maker, shape.slots, limits, gap, most_s)
                        bars += _bars(title, shape, limits, gap, most_s, found)
                        print(title, _line(found), file=sys.stderr, flush=True)
    return report("planner", results, bars)


def _problems(folder: Path, name: str, shapes: list[Shape]) -> Iterator[tuple[Shape, int, Maker]]:
    """Every cluster with a maker of the subject's problem on it."""
    if name == GENERATED:
        known = catalogue()
        for shape in shapes:
            for gbit_per_s in BETWEEN_GBIT_PER_S:
                cluster = shape.cluster(gbit_per_s, lambda kind: known.type(kind).memory_bytes)
                yield shape, gbit_per_s, partial(generated, KERNELS, cluster)
        return
    make(folder, name)
    subject = load(folder, name)
    for shape in shapes:
        for gbit_per_s in BETWEEN_GBIT_PER_S:

            def problem(slots: int, shape: Shape = shape, gbit_per_s: int = gbit_per_s) -> Problem:
                setting = subject.setting(shape, gbit_per_s)
                condition = setting.condition(shape.devices)
                return setting.problem(setting.choices[0], setting.origin.cluster.devices, slots, condition)

            yield shape, gbit_per_s, problem


def _targets(shape: Shape, limits: Limits) -> list[tuple[str, float, float]]:
    """What a cell is called, the gap that it is solved to, and in how many seconds at best."""
    if limits != "none":
        return [(f"{limits} memory", PAIR_GAP, LIMITED_SECONDS)]
    if shape.devices == MANY:
        return [("to 7%", MANY_GAP, MANY_SECONDS), ("to 1%", PAIR_GAP, float("inf"))]
    return [("to 1%", PAIR_GAP, PAIR_SECONDS if shape.devices == 2 else float("inf"))]


def _held(shape: Shape, limits: Limits, most_s: float) -> bool:
    """Whether there is a bar for such cells."""
    return most_s < float("inf") and (limits == "none" or shape.devices == 2)


def _bars(
    title: str, shape: Shape, limits: Limits, gap: float, most_s: float, found: dict[str, Any]
) -> list[Bar]:
    """The claims that a cell is held to."""
    if not _held(shape, limits, most_s):
        return []
    if limits != "none" and found["gap"] is None:
        return []  # it says what is short
    gap = LIMITED_GAP if limits != "none" else gap
    if shape.devices == 2 and limits == "none" and found["kernels"] >= LARGE_KERNELS:
        most_s = LARGE_PAIR_SECONDS
    value = {"process_s": found["process_s"], "wall_s": found["wall_s"], "gap": found["gap"]}
    holds = found["gap"] is not None and bool(found["gap"] <= gap and found["process_s"] < most_s)
    return [Bar(title, value, f"gap <= {gap:.0%} in less than {most_s:g} s", holds)]


def _line(found: dict[str, Any]) -> str:
    gap = "does not fit" if found["gap"] is None else f"gap {found['gap']:.2%}"
    return f"{gap} {found['process_s']} s (wall {found['wall_s']}, load {found['load_average']})"


if __name__ == "__main__":
    sys.exit(main())
