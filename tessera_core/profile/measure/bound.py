"""A device type measured on the hardware here that it is bound to: times, the device, and the links that leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tessera_core.devices.cpu import CpuDevice, cpu_device, processor_name, usable_cpus
from tessera_core.profile.measure.cpu import CpuMeasurement, WholeTime
from tessera_core.profile.measure.links_shared_memory import measure_link
from tessera_core.profile.measure.overhead import segment_overhead_us
from tessera_core.profile.times import Condition, DeviceRow, LinkRow, TimeRow
from tessera_core.program.ir import Trace

LINK_SHARE = 0.1
"""Share of the time budget that goes to the link between two workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredType:
    """What was measured of one type. ``whole``: iterations by (program id, condition). ``unmeasured``: why, by
    signature, a kernel could not be run on this hardware."""

    rows: tuple[TimeRow, ...]
    links: tuple[LinkRow, ...]
    device: DeviceRow
    whole: Mapping[tuple[int, Condition], WholeTime]
    unmeasured: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measuring ``trace``, read from ``path`` by the workers; ``seconds``: for one device type.

    ``beside``: hardware that is busy meanwhile, for the conditions "beside" and "copies".
    """

    trace: Trace
    path: Path
    beside: str | None
    trust: bool
    seconds: float

    def on_cpu(self, device_type: str, cpu: CpuDevice, progress: Callable[[str], None]) -> MeasuredType:
        """Times, the link to a second worker where there is one, and the device itself.

        Raises what replay raises, and :class:`DeviceLostError` where a worker dies.
        """
        other = cpu_device(self.beside) if self.beside is not None else _another_cpu(cpu)
        links: tuple[LinkRow, ...] = ()
        if other is not None:
            progress(f"{device_type}: link between {cpu.name} and {other.name}")
            link = measure_link(cpu, other, device_type, self.seconds * LINK_SHARE)
            links = (replace(link, dated=_now()),)
        overhead_us = segment_overhead_us(cpu)
        found = CpuMeasurement(
            trace=self.trace,
            path=self.path,
            device_type=device_type,
            cpu=cpu,
            beside=other if self.beside is not None else None,
            trust=self.trust,
            seconds=self.seconds * (1 - LINK_SHARE),
        ).run(progress)
        device = DeviceRow(
            device_type=device_type,
            hardware=f"{processor_name()}, {cpu.name}",
            threads=1,
            overhead_us=overhead_us,
            date=_now(),
            source="measured",
        )
        return MeasuredType(rows=found.rows, links=links, device=device, whole=found.whole, unmeasured={})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _another_cpu(cpu: CpuDevice) -> CpuDevice | None:
    """A second CPU for the far end of a link; None where this process may use only one."""
    others = [index for index in range(len(usable_cpus())) if index != cpu.index]
    return replace(cpu, index=others[0], number=usable_cpus()[others[0]]) if others else None
