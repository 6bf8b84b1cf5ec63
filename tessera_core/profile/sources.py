"""Where a kernel's time comes from when it is not measured here: recorded by somebody's profiler, looked up in
published tables, or modelled. Each source answers for the kernels that it knows; the stage asks them in order of trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import DeviceType
from tessera_core.profile.model.collective import collective_time
from tessera_core.profile.model.roofline import modelled_time
from tessera_core.profile.precision import computed_in, converts
from tessera_core.profile.question import Question
from tessera_core.profile.recorded import recorded_device, recorded_rows, recorded_target
from tessera_core.profile.times import Condition, DeviceRow, TimeRow
from tessera_formats.deps import WHOLE


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
    """What published tables say of all kernels on ``kinds``, chosen together so that like is compared with like."""
    kernels = {
        signature: kernel for signature, kernel in question.kernels.items() if signature not in question.joins
    }
    asked = [kind.name for kind in kinds if kind.kind == "gpu"]
    if not asked:
        return Looked({}, ())
    # Late: reading Parquet takes its time to load.
    from tessera_core.profile.silicon.lookup import silicon_rows
    from tessera_core.profile.silicon.tables import INSTALL, find_package

    if find_package() is None:
        return Looked({}, (f"no published tables are installed, so their part is modelled; run: {INSTALL}",))

    found = silicon_rows(question.trace, kernels, asked)
    return Looked(found.rows, found.missing)


def modelled(
    question: Question,
    kind: DeviceType,
    signatures: Iterable[str],
    condition: Condition = "alone",
) -> list[TimeRow]:
    """A modelled time of each of ``signatures`` on ``kind``; of collectives, a ring's."""
    device = ModelledDevice(kind, question.catalogue)
    rows = []
    for signature in signatures:
        own, join = question.kernels[signature], question.joins.get(signature)
        kernel, work = computed_in(own, question.works[signature], kind.dtype)
        time = modelled_time(kernel, device) if join is None else collective_time(join, device)
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
