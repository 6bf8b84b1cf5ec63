"""Runs the predictor's benchmark, or with ``--fit`` writes the coefficients that the toolchain ships."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import tomli_w

from benchmarks import Bar, report
from benchmarks.predictor.accuracy import Predicted, plain_errors, rounded, size_classes
from benchmarks.predictor.left_out import left_out
from benchmarks.predictor.measured import against_measurements
from benchmarks.predictor.points import FRAMEWORK, GPUS, GROUPS, points, shared
from benchmarks.predictor.seen import HELD_OUT, carried_weight, seen
from benchmarks.predictor.shipped import shipped
from tessera_core.profile.model.coefficients import COEFFICIENTS, fits_document, memory_kind
from tessera_core.profile.silicon.choice import newest, preferred
from tessera_core.profile.silicon.interpolate import leave_out
from tessera_core.profile.silicon.memory import from_memory
from tessera_core.profile.silicon.tables import INSTALL, SiliconPackage, SiliconTable, find_package

PAIRS = (
    ("a100-80gb", "l40s"),
    ("h100-sxm", "rtx-pro-6000"),
    ("b200-sxm", "h100-sxm"),
    ("a100-80gb", "h100-sxm"),
    ("h200-sxm", "l40s"),
)
HEADER = """\
# Written by `python -m benchmarks.predictor --fit`; docs/predictor.md says what the figures mean. Each was fitted to
# the published times of the tables named; none of these times is in here.

"""
TWINS = {"h100-sxm": "h200-sxm"}
"""GPUs whose chip another one has as well: left out with it, nothing of the architecture has been seen."""

SEEN_MEDIAN, SEEN_MEAN, GOAL_MEDIAN = 0.10, 0.20, 0.20
INSIDE, WIDTH = (0.85, 0.97), 0.25
INTERPOLATED_MEDIAN, INTERPOLATED_SHARE = 0.04, 0.03
MEMORY_BOUND_MEDIAN = 0.10


def pair(
    package: SiliconPackage, kind: str, source: str, target: str
) -> tuple[dict[str, Any], Predicted, Predicted] | None:
    """Accuracy on the held-out shapes that both GPUs have, and both predictions; None where there are none."""
    first, second = points(package, source, kind), points(package, target, kind)
    known, other = seen(package, target, kind), seen(package, source, kind)
    if first is None or second is None or known is None or other is None:
        return None
    first, second = shared(first, second)
    held = second.shares() < HELD_OUT
    first, second = first.select(held), second.select(held)
    with_table = known.predict(second)
    memory = memory_kind(second.chip())
    without = left_out(package, kind, memory, (target,))
    alone = without.predict(first, second)
    twin = TWINS.get(target)
    found: dict[str, Any] = {}
    if twin is not None and source != twin:
        found["twin_left_out_too"] = twin
        found["left_out_with_twin"] = (
            left_out(package, kind, memory, (target, twin)).predict(first, second).facts()
        )
    stated, measured = plain_errors(first, second, True), plain_errors(first, second, False)

    def facts(rows: Any = None) -> dict[str, Any]:
        kept = np.ones(len(stated), dtype=np.bool_) if rows is None else rows
        if not kept.any():
            return {"points": 0}
        return {
            "seen": with_table.facts(kept),
            "left_out": alone.facts(kept),
            "plain_ratio_stated": _errors(stated[kept]),
            "plain_ratio_measured": _errors(measured[kept]),
        }

    found = {
        "source": source,
        "target": target,
        "tables": [first.table, second.table],
        **facts(),
        **found,
        "carried_where_seen": carried_weight(other, known, corrected=True),
        "left_out_fitted_to": list(without.members),
        "left_out_carried": without.carried,
        "by_size": {name: facts(rows) for name, rows in size_classes(second).items()},
    }
    return found, with_table, alone


def _errors(errors: Any) -> dict[str, float]:
    return {"median": rounded(np.median(errors)), "mean": rounded(np.mean(errors))}


def together(predictions: list[Predicted]) -> dict[str, Any]:
    """Facts over the points of several pairs."""
    joined = Predicted(
        time_us=np.concatenate([each.time_us for each in predictions]),
        half_width=np.concatenate([each.half_width for each in predictions]),
        actual_us=np.concatenate([each.actual_us for each in predictions]),
    )
    return joined.facts()


def interpolation(package: SiliconPackage) -> dict[str, dict[str, Any]]:
    """Points of each GPU's tables of products, left out and interpolated between the rest.

    ``used``: the table that lookups prefer, as they take it (weights from memory); ``published``: the same as it is;
    ``fitted``: the one to which the model is fitted, as it is.
    """
    found = {}
    for gpu in GPUS:
        used = newest(package, "products", preferred("products")[0], gpu, "bfloat16")
        fitted = newest(package, "products", FRAMEWORK, gpu, "bfloat16")
        if used is not None and fitted is not None:
            found[gpu] = {
                "used": _interpolated(from_memory(used)),
                "published": _interpolated(used),
                "fitted": _interpolated(fitted),
                "raised_by_memory": rounded(np.mean(from_memory(used).time_us > used.time_us)),
            }
    return found


def _interpolated(table: SiliconTable) -> dict[str, Any]:
    left = leave_out(table, INTERPOLATED_SHARE, seed=0)
    return {
        "table": table.source.name,
        "points": len(left.actual),
        "median": rounded(np.median(left.errors)),
        "inside": rounded(left.covered),
        "width": rounded(left.width),
        "largest_factor": rounded(np.max(left.high / left.low)),
    }


def bars_of(found: dict[str, Any]) -> list[Bar]:
    """What the results claim, and whether it holds."""
    bars = []
    for each in found["pairs"]["products"]:
        name = f"{each['source']} to {each['target']}"
        ours, alone, plain = each["seen"], each["left_out"], each["plain_ratio_stated"]
        bars += [
            _at_most(f"{name}, target seen: median error", ours["median"], SEEN_MEDIAN),
            _at_most(f"{name}, target seen: mean error", ours["mean"], SEEN_MEAN),
            _at_most(f"{name}, target left out: median error, a goal", alone["median"], GOAL_MEDIAN),
            _below(f"{name}, target left out: median below the plain ratio's", alone, plain, "median"),
            _below(f"{name}, target left out: mean below the plain ratio's", alone, plain, "mean"),
        ]
    ours, alone = found["products"]["seen"], found["products"]["left_out"]
    for name, facts in (("target seen", ours), ("target left out", alone)):
        bars.append(_inside(f"{name}: share inside 90% intervals", facts["inside"]))
    bars.append(_at_most("target seen: median width of intervals", ours["width"], WIDTH))
    for gpu, each in found["interpolation"].items():
        name, used = f"interpolation inside the table of {gpu} that lookups use", each["used"]
        bars.append(_at_most(f"{name}: median error", used["median"], INTERPOLATED_MEDIAN))
        bars.append(_inside(f"{name}: share inside 90% intervals", used["inside"]))
        bars.append(_at_most(f"{name}: median width of intervals", used["width"], WIDTH))
    for name, key in (("", "median"), (" of traces that chose no start or rate", "median_unseen")):
        measured = found["measured"][key]
        bars.append(
            _at_most(f"memory-bound kernels on the H200{name}: median error", measured, MEMORY_BOUND_MEDIAN)
        )
    return bars


def _at_most(name: str, value: float | None, bar: float) -> Bar:
    return Bar(name, value, f"<= {bar}", value is not None and value <= bar)


def _inside(name: str, share: float) -> Bar:
    return Bar(name, share, f"{INSIDE[0]} to {INSIDE[1]}", INSIDE[0] <= share <= INSIDE[1])


def _below(name: str, ours: dict[str, Any], theirs: dict[str, Any], which: str) -> Bar:
    return Bar(name, ours[which], f"< {theirs[which]}", ours[which] < theirs[which])


def main() -> int:
    """Measure everything, or fit; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictor", description=__doc__)
    parser.add_argument("--fit", action="store_true", help=f"write {COEFFICIENTS.name} and measure nothing")
    options = parser.parse_args()
    package = find_package()
    if package is None:
        print(f"the published tables are not installed; {INSTALL}", file=sys.stderr)
        return 1
    if options.fit:
        COEFFICIENTS.write_text(HEADER + tomli_w.dumps(fits_document(shipped(package))))
        return 0
    found: dict[str, Any] = {"tables": package.name, "pairs": {}}
    for kind in GROUPS:
        done = [each for source, target in PAIRS if (each := pair(package, kind, source, target))]
        found["pairs"][kind] = [facts for facts, _, _ in done]
        found[kind] = {
            "seen": together([each for _, each, _ in done]),
            "left_out": together([each for _, _, each in done]),
        }
    found["interpolation"] = interpolation(package)
    found["measured"] = against_measurements()
    return report("predictor", found, bars_of(found))


if __name__ == "__main__":
    sys.exit(main())
