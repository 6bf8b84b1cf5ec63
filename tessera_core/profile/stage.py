"""The profile stage: a time for every kernel signature of a trace on every device type asked for.

Types bound to hardware here (``cpu-1thread=cpu:0``) are measured; the type on which a trace's times were recorded by a
profiler has those; all others are modelled from the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tessera_core.devices.cpu import CpuDevice, cpu_device, processor_name, usable_cpus
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import DeviceType, catalogue
from tessera_core.profile.model.collective import Collective, collective_time, collectives
from tessera_core.profile.model.roofline import modelled_time
from tessera_core.profile.recorded import recorded_device, recorded_rows, recorded_target
from tessera_core.profile.times import Condition, DeviceRow, LinkRow, TimeRow, fields_of
from tessera_core.program.guards import check_replayable
from tessera_core.program.ir import Kernel, Trace
from tessera_core.program.store import trace_from_bundle
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.bundle import Bundle
from tessera_formats.deps import WHOLE
from tessera_formats.errors import InputError
from tessera_formats.profile import CONDITIONS, SOURCES, TIMES, write_profile
from tessera_formats.trace import read_trace

if TYPE_CHECKING:
    from tessera_core.profile.measure.cpu import Measured, WholeTime

LINK_SHARE = 0.1
"""Share of the time budget that goes to the link between two workers."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A device type of the profile, and the hardware to measure it on (None: modelled)."""

    type: DeviceType
    cpu: CpuDevice | None


def parse_device(text: str) -> Binding:
    """Read ``TYPE`` or ``TYPE=cpu:K``.

    Raises :class:`InputError` for an unknown type, hardware that is not here, or a type of another kind.
    """
    name, equals, hardware = text.partition("=")
    kind = catalogue().type(name)
    if not equals:
        return Binding(kind, None)
    cpu = cpu_device(hardware)
    if kind.kind != "cpu":
        raise InputError(
            f"device {text}: {name} is a {kind.kind.upper()}, {hardware} is not;"
            f" write --device {name} to model it, or --device cpu-1thread={hardware}"
        )
    return Binding(kind, cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStage:
    """Times for ``devices``, each ``TYPE`` or ``TYPE=cpu:K``.

    ``beside``: a second CPU (``cpu:1``) that runs the same work meanwhile, for times under the condition
    "beside". ``trust``: import user code that the trace names. ``seconds``: time to spend on measuring.
    """

    devices: tuple[str, ...]
    beside: str | None = None
    trust: bool = False
    seconds: float = 20.0

    def run(self, trace: Path, output: Path | str, progress: Callable[[str], None] = lambda _: None) -> Facts:
        """Profile ``trace`` and write the artifact to ``output`` (``-``: standard output).

        Raises :class:`InputError` for device types, hardware or a trace that cannot be profiled so, and
        :class:`DeviceLostError` where a measuring worker dies. Nothing is written then.
        """
        bindings = self._bindings()
        bundle = read_trace(trace)
        loaded = trace_from_bundle(bundle)
        kernels, joins = unique_kernels(loaded), collectives(loaded)
        rows: list[TimeRow] = []
        links: list[LinkRow] = []
        devices: list[DeviceRow] = []
        whole: dict[tuple[str, int, str], WholeTime] = {}
        measured = [binding for binding in bindings if binding.cpu is not None]
        if measured:
            _check_measurable(loaded, trace)
        for binding in bindings:
            if binding.cpu is None:
                timed, device = _recorded(loaded, bundle, binding.type, kernels)
                known = {row.signature for row in timed}
                rest = [kernel for signature, kernel in kernels.items() if signature not in known]
                rows += [*timed, *modelled_rows(rest, binding.type.name, joins)]
                devices.append(device)
            else:
                found, link, device = self._measure(
                    trace, loaded, binding.type, binding.cpu, len(measured), progress
                )
                rows += [row for row in found.rows if row.signature not in joins]
                for condition in dict.fromkeys(row.condition for row in found.rows):
                    tied = [kernels[signature] for signature in joins]
                    rows += modelled_rows(tied, binding.type.name, joins, condition)
                links += link
                devices.append(device)
                whole |= {(binding.type.name, *place): time for place, time in found.whole.items()}
        header = {
            "program_digest": loaded.digest,
            "links": [fields_of(link) for link in links],
            "devices": [fields_of(device) for device in devices],
        }
        write_profile(output, header, TIMES.build([fields_of(row) for row in rows]))
        return profile_facts(loaded, rows, links, devices, whole)

    def _bindings(self) -> tuple[Binding, ...]:
        if not self.devices:
            raise InputError(
                "no device was named; add --device TYPE, or --device cpu-1thread=cpu:0 to measure"
            )
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"--seconds {self.seconds}: is not a time; name a number of seconds above 0")
        bindings = tuple(parse_device(text) for text in self.devices)
        names = [binding.type.name for binding in bindings]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"device type {name}: is named {names.count(name)} times; name it once")
        if self.beside is not None:
            other = cpu_device(self.beside)
            cpus = [binding.cpu for binding in bindings if binding.cpu is not None]
            if not cpus:
                raise InputError(
                    f"--beside {self.beside}: nothing is measured; add --device cpu-1thread=cpu:0"
                )
            if other in cpus:
                raise InputError(f"--beside {self.beside}: is what is measured itself; name another CPU")
        return bindings

    def _measure(
        self,
        path: Path,
        trace: Trace,
        kind: DeviceType,
        cpu: CpuDevice,
        sharing: int,
        progress: Callable[[str], None],
    ) -> tuple[Measured, list[LinkRow], DeviceRow]:
        """Times, the link to a second worker where there is one, and the device itself."""
        from tessera_core.profile.measure.cpu import CpuMeasurement
        from tessera_core.profile.measure.links_shared_memory import measure_link
        from tessera_core.profile.measure.overhead import segment_overhead_us

        budget = self.seconds / sharing
        other = cpu_device(self.beside) if self.beside is not None else _another_cpu(cpu)
        links = []
        if other is not None:
            progress(f"{kind.name}: link between {cpu.name} and {other.name}")
            links = [measure_link(cpu, other, kind.name, budget * LINK_SHARE)]
        overhead_us = segment_overhead_us(cpu)
        measurement = CpuMeasurement(
            trace=trace,
            path=path,
            device_type=kind.name,
            cpu=cpu,
            beside=other if self.beside is not None else None,
            trust=self.trust,
            seconds=budget * (1 - LINK_SHARE),
        )
        found = measurement.run(progress)
        device = DeviceRow(
            device_type=kind.name,
            hardware=f"{processor_name()}, {cpu.name}",
            threads=1,
            overhead_us=overhead_us,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            source="measured",
        )
        return found, links, device


def _recorded(
    trace: Trace, bundle: Bundle, kind: DeviceType, kernels: Mapping[str, Kernel]
) -> tuple[list[TimeRow], DeviceRow]:
    """Times that a profiler recorded on this device type, none where the trace has none, and the device."""
    target = recorded_target(bundle, kind.name)
    if target is None:
        return [], _modelled_device(kind)
    rows = recorded_rows(trace, bundle, target, kind.name, kernels)
    return rows, recorded_device(bundle, target, kind.name)


def unique_kernels(trace: Trace) -> dict[str, Kernel]:
    """One kernel of each signature, in program order."""
    kernels: dict[str, Kernel] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            kernels.setdefault(kernel.signature, kernel)
    return kernels


def modelled_rows(
    kernels: Iterable[Kernel],
    device_type: str,
    joins: Mapping[str, Collective],
    condition: Condition = "alone",
) -> list[TimeRow]:
    """A roofline time of every kernel on a catalogued type; of those in ``joins``, a ring's."""
    device = ModelledDevice.of(device_type)
    rows = []
    for kernel in kernels:
        work = joins.get(kernel.signature)
        time = modelled_time(kernel, device) if work is None else collective_time(work, device)
        rows.append(
            TimeRow(
                signature=kernel.signature,
                part=WHOLE,
                device_type=device_type,
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
                dtype=kernel.dtype,
                source="modelled",
                hardware="",
                dated=catalogue().date,
                detail=time.detail,
            )
        )
    return rows


def profile_facts(
    trace: Trace,
    rows: Sequence[TimeRow],
    links: Sequence[LinkRow],
    devices: Sequence[DeviceRow],
    whole: Mapping[tuple[str, int, str], WholeTime],
) -> Facts:
    """What a profile found: each type's time per iteration of each program, with its share by source.

    ``whole``: measured times of whole iterations by (device type, program id, condition).
    """
    table: list[tuple[object, ...]] = []
    shares = [f"{source}_share" for source in SOURCES]
    for device in devices:
        for condition in CONDITIONS:
            own = {
                row.signature: row
                for row in rows
                if row.device_type == device.device_type and row.condition == condition
            }
            if own:
                for program in trace.programs:
                    time = whole.get((device.device_type, program.id, condition))
                    table.append(
                        (
                            device.device_type,
                            program.name,
                            condition,
                            len(program.kernels),
                            *_totals(program.kernels, own),
                            None if time is None else round(time.median_us, 1),
                            None if time is None else round(time.disturbed, 3),
                        )
                    )
    tables = [
        FactTable(
            "iterations",
            (
                "device_type",
                "program",
                "condition",
                "kernels",
                "total_us",
                "low_us",
                "high_us",
                *shares,
                "whole_us",
                "disturbed_share",
            ),
            tuple(table),
        ),
        FactTable(
            "devices",
            ("device_type", "source", "hardware", "rows", "overhead_us"),
            tuple(
                (
                    device.device_type,
                    device.source,
                    device.hardware,
                    sum(row.device_type == device.device_type for row in rows),
                    round(device.overhead_us, 2),
                )
                for device in devices
            ),
        ),
    ]
    if links:
        tables.append(
            FactTable(
                "links",
                (
                    "source",
                    "destination",
                    "transport",
                    "latency_us",
                    "gbit_per_s",
                    "send_us",
                    "receive_us",
                    "residual_share",
                ),
                tuple(
                    (
                        link.source,
                        link.destination,
                        link.transport,
                        round(link.latency_us, 2),
                        round(link.gbit_per_s, 2),
                        round(link.send_us, 2),
                        round(link.receive_us, 2),
                        round(link.residual, 3),
                    )
                    for link in links
                ),
            )
        )
    values = {
        "model": trace.info["model"],
        "kernels": sum(len(program.kernels) for program in trace.programs),
        "signatures": len(unique_kernels(trace)),
        "rows": len(rows),
        "catalogue": catalogue().date,
    }
    return Facts("profile", values, tuple(tables))


def _totals(kernels: Sequence[Kernel], own: Mapping[str, TimeRow]) -> tuple[float, ...]:
    """Time of an iteration, its interval were all kernels off alike, and the share of the time by source."""
    found = [own[kernel.signature] for kernel in kernels]
    total = sum(row.median_us for row in found)
    shares = [sum(row.median_us for row in found if row.source == source) for source in SOURCES]
    return (
        round(total, 1),
        round(sum(row.low_us for row in found), 1),
        round(sum(row.high_us for row in found), 1),
        *(round(share / total, 4) if total else 0.0 for share in shares),
    )


def _modelled_device(kind: DeviceType) -> DeviceRow:
    return DeviceRow(
        device_type=kind.name,
        hardware=kind.hardware,
        threads=1 if kind.kind == "cpu" else 0,
        overhead_us=kind.segment_overhead_us,
        date=catalogue().date,
        source="modelled",
    )


def _another_cpu(cpu: CpuDevice) -> CpuDevice | None:
    """A second CPU for the far end of a link; None where this process may use only one."""
    others = [index for index in range(len(usable_cpus())) if index != cpu.index]
    return replace(cpu, index=others[0], number=usable_cpus()[others[0]]) if others else None


def _check_measurable(trace: Trace, path: Path) -> None:
    if trace.info["fake"]:
        raise InputError(
            f"{path}: was traced with --fake, so there are no values to measure with;"
            " trace without --fake, or name device types without =cpu:K to model them"
        )
    check_replayable(trace, path, "name device types without =cpu:K to model them")
