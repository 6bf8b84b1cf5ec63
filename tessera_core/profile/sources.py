"""Where a kernel's time comes from when it is not measured here: recorded by somebody's profiler, looked up in
published tables, or modelled. Each source answers for the kernels that it knows; the stage asks them in order of trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import DeviceType
from tessera_core.profile.model.collective import collective_time
from tessera_core.profile.precision import computed_in, converts
from tessera_core.profile.question import Question
from tessera_core.profile.recorded import recorded_device, recorded_rows, recorded_target
from tessera_core.profile.times import Condition, DeviceRow, TimeRow
from tessera_core.profile.type_name import TypeName
from tessera_formats.deps import WHOLE
from tessera_formats.errors import InputError

if TYPE_CHECKING:
    from tessera_core.profile.model.predict import Reference


@dataclass(frozen=True, slots=True)
class Looked:
    """Rows of published tables, by (device type, signature), and a line for each kind of kernel that has none."""

    rows: Mapping[tuple[str, str], TimeRow]
    missing: tuple[str, ...]


def recorded(question: Question, kind: DeviceType) -> tuple[list[TimeRow], DeviceRow | None]:
    """Times that a profiler recorded on this very type, and the device; none and None where the trace has none."""
    target = recorded_target(question.bundle, kind.name)
    if target is None:
        return [], None
    rows = recorded_rows(
        question.trace,
        question.bundle,
        target,
        kind,
        question.kernels,
        question.catalogue.small_error,
    )
    return rows, recorded_device(question.bundle, target, kind)


def silicon(question: Question, kinds: Sequence[DeviceType]) -> Looked:
    """What published tables say of all kernels on ``kinds``, chosen together so that like is compared with like.

    Tables hold whole GPUs: of a slice the whole GPU's rows are given instead, for the model to start from.
    """
    kernels = {
        signature: kernel for signature, kernel in question.kernels.items() if signature not in question.joins
    }
    asked = [kind.name for kind in kinds if kind.kind == "gpu"]
    slices = [kind for kind in kinds if kind.multiprocessors < kind.whole_multiprocessors]
    wholes = [str(TypeName(base=kind.base, dtype=kind.dtype)) for kind in slices]
    if not asked:
        return Looked({}, ())
    # Late: reading Parquet takes its time to load.
    from tessera_core.profile.silicon.lookup import silicon_rows
    from tessera_core.profile.silicon.tables import INSTALL, find_package

    if find_package() is None:
        return Looked({}, (f"no published tables are installed, so their part is modelled; run: {INSTALL}",))
    found = silicon_rows(question.trace, kernels, list(dict.fromkeys([*asked, *wholes])))
    said = [line for line in found.missing if any(line.startswith(f"{name}: ") for name in asked)]
    return Looked(found.rows, tuple(said))


def references_of(rows: Iterable[TimeRow]) -> dict[str, list[TimeRow]]:
    """Times that the model may carry over to other types, by signature: known ones, of kernels that run alone."""
    found: dict[str, list[TimeRow]] = {}
    for row in rows:
        if row.source != "modelled" and row.condition == "alone" and row.median_us > 0 and row.low_us > 0:
            found.setdefault(row.signature, []).append(row)
    return found


def modelled(
    question: Question,
    kind: DeviceType,
    signatures: Iterable[str],
    references: Mapping[str, Sequence[TimeRow]],
    *,
    condition: Condition = "alone",
    tables: bool = True,
) -> list[TimeRow]:
    """A modelled time of each of ``signatures`` on ``kind``; of collectives, a ring's.

    ``references``: times on other types, of which the one on the most similar GPU is carried over. ``tables``: correct
    by the points of the type's published table.
    """
    from tessera_core.profile.model.predict import modelled_time  # late: loading SciPy takes its time

    device = ModelledDevice(kind, question.catalogue)
    rows = []
    for signature in signatures:
        own, join = question.kernels[signature], question.joins.get(signature)
        kernel, work = computed_in(own, question.works[signature], kind.dtype)
        if join is not None:
            time = collective_time(join, device)
        else:
            known = _known(question, kind, work.dtype, references.get(signature, ()))
            time = modelled_time(work, device, known, tables=tables)
        rows.append(
            TimeRow(
                signature=signature,
                part=WHOLE,
                device_type=kind.name,
                condition=condition,
                cache="sequence",
                median_us=time.median_us,
                p10_us=time.median_us,
                p90_us=time.median_us,
                low_us=time.low_us,
                high_us=time.high_us,
                samples=0,
                flops=kernel.flops,
                bytes=kernel.read_bytes + kernel.written_bytes,
                dtype=work.dtype if converts(work) else own.dtype,
                source="modelled",
                hardware="",
                dated=question.catalogue.date,
                detail=time.detail,
            )
        )
    return rows


def _known(question: Question, kind: DeviceType, dtype: str, rows: Sequence[TimeRow]) -> list[Reference]:
    """Rows as the model takes them: on other GPUs of the catalogue, in the dtype that is asked for.

    Where there are rows of the same GPU, whole or another slice of it, no other is taken.
    """
    from tessera_core.profile.model.predict import Reference

    found = []
    for row in rows:
        if row.device_type == kind.name or row.dtype != dtype or kind.kind != "gpu":
            continue
        try:
            other = question.catalogue.type(row.device_type)
        except InputError:  # a type of somebody else's catalogue
            continue
        if other.kind == "gpu":
            device = ModelledDevice(other, question.catalogue)
            found.append(
                Reference(
                    device=device,
                    time_us=row.median_us,
                    low_us=row.low_us,
                    high_us=row.high_us,
                    source=row.source,
                )
            )
    return [reference for reference in found if reference.device.type.base == kind.base] or found


def modelled_device(question: Question, kind: DeviceType) -> DeviceRow:
    """A type that is not measured here, as the catalogue has it."""
    return DeviceRow(
        device_type=kind.name,
        hardware=kind.hardware,
        threads=1 if kind.kind == "cpu" else 0,
        overhead_us=kind.segment_overhead_us,
        date=question.catalogue.date,
        source="modelled",
    )
