"""The coefficients that the toolchain ships: every class fitted to all points, widths from shapes held out."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from benchmarks.predictor.accuracy import rounded
from benchmarks.predictor.fitting import fit
from benchmarks.predictor.left_out import left_out, members
from benchmarks.predictor.points import GPUS, GROUPS, Points, points
from benchmarks.predictor.seen import carried_weight, seen
from tessera_core.profile.model.coefficients import Fits, FittedSet
from tessera_core.profile.model.tables import ORDER
from tessera_core.profile.silicon.tables import SiliconPackage

COMMAND = "python -m benchmarks.predictor --fit"


def shipped(package: SiliconPackage) -> Fits:
    """All sets: one per class and GPU with a table, and one per class and kind of memory."""
    sets = [each for kind in GROUPS for gpu in GPUS if (each := own_set(package, gpu, kind))]
    sets += [memory_set(package, kind, memory) for kind in GROUPS for memory in ("hbm", "gddr")]
    return Fits(
        date=datetime.now(UTC).date().isoformat(), package=package.name, command=COMMAND, sets=tuple(sets)
    )


def own_set(package: SiliconPackage, gpu: str, kind: str) -> FittedSet | None:
    """A GPU's own set of a class; None where it has no table."""
    known = seen(package, gpu, kind)
    if known is None:
        return None
    sources = [other for name in GPUS if name != gpu and (other := seen(package, name, kind))]
    carried = [carried_weight(source, known, corrected=False) for source in sources]
    share = sum(carried) / len(carried)
    return FittedSet(
        kind=kind,
        name=gpu,
        members=(gpu,),
        tables=(_framework(known.points),),
        points=len(known.points.keys),
        fitted=fit([known.points]),
        carried=rounded(share),
        half_width=known.half_width,
        half_width_carried=known.half_width,
        scatter_factor=known.scatter_factor,
        ranges=_ranges([known.points]),
    )


def memory_set(package: SiliconPackage, kind: str, memory: str) -> FittedSet:
    """The set of a class for GPUs without a table, by their kind of memory."""
    known = left_out(package, kind, memory, (), everything=True)
    held = [each for gpu in members(package, kind, memory, ()) if (each := points(package, gpu, kind))]
    return FittedSet(
        kind=kind,
        name=memory,
        members=known.members,
        tables=tuple(dict.fromkeys(_framework(each) for each in held)),
        points=sum(len(each.keys) for each in held),
        fitted=known.fitted,
        carried=known.carried,
        half_width=known.half_width,
        half_width_carried=known.half_width_carried,
        scatter_factor=0.0,
        ranges=_ranges(held),
    )


def _framework(known: Points) -> str:
    return known.table.partition(", ")[2]


def _ranges(held: Iterable[Points]) -> dict[str, tuple[float, float]]:
    tables = list(held)
    return {
        name: (
            min(float(each.sizes[name].min()) for each in tables),
            max(float(each.sizes[name].max()) for each in tables),
        )
        for name in ORDER[tables[0].kind]
    }
