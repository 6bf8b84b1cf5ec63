"""A device type measured on the hardware here that it is bound to: times, the device, and the links that leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path

from tessera_core.devices.cpu import CpuDevice, processor_name, usable_cpus
from tessera_core.devices.cuda import CudaDevice
from tessera_core.profile.binding import Binding, Hardware, beside_of
from tessera_core.profile.measure.cpu import CpuMeasurement, WholeTime
from tessera_core.profile.measure.links_shared_memory import measure_link
from tessera_core.profile.measure.overhead import segment_overhead_us
from tessera_core.profile.times import Condition, DeviceRow, LinkRow, TimeRow
from tessera_core.program.ir import Trace

LINK_SHARE = 0.1
"""Share of the time budget that goes to links."""


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

    ``beside``: hardware that is busy meanwhile, for the conditions "beside" and "copies". ``warm``: on CUDA devices
    caches are kept hot. ``measured``: all that is measured in the same call.
    """

    trace: Trace
    path: Path
    beside: str | None
    trust: bool
    seconds: float
    warm: bool
    measured: tuple[Hardware, ...]

    def of(self, binding: Binding, progress: Callable[[str], None]) -> MeasuredType:
        """Measure what ``binding`` binds; raises what replay raises, and the errors of lost workers and full GPUs."""
        hardware = binding.hardware
        assert hardware is not None, f"{binding.type.name} is not bound"
        if isinstance(hardware, CudaDevice):
            return self._on_cuda(binding.type.name, hardware, progress)
        return self._on_cpu(binding.type.name, hardware, progress)

    def _on_cuda(self, device_type: str, device: CudaDevice, progress: Callable[[str], None]) -> MeasuredType:
        from tessera_core.profile.measure.cuda import CudaMeasurement  # late: it needs torch and Triton

        other = beside_of(device, self.beside, self.measured)
        found = CudaMeasurement(
            trace=self.trace,
            path=self.path,
            device_type=device_type,
            hardware=device,
            beside=other if isinstance(other, CudaDevice) else None,
            trust=self.trust,
            seconds=self.seconds,
            warm=self.warm,
        ).run(progress)
        row = DeviceRow(
            device_type=device_type,
            hardware=found.hardware,
            threads=0,
            overhead_us=found.overhead_us,
            date=_now(),
            source="measured",
        )
        return MeasuredType(
            rows=found.rows, links=(), device=row, whole=found.whole, unmeasured=found.unmeasured
        )

    def _on_cpu(self, device_type: str, cpu: CpuDevice, progress: Callable[[str], None]) -> MeasuredType:
        """Times, the link to a second worker where there is one, and the device itself."""
        named = beside_of(cpu, self.beside, self.measured)
        beside = named if isinstance(named, CpuDevice) else None
        other = beside or _another_cpu(cpu)
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
            beside=beside,
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


def copies_between(
    bindings: Sequence[Binding], seconds: float, progress: Callable[[str], None]
) -> tuple[LinkRow, ...]:
    """Links from and to CUDA devices among ``bindings``, both ways, in about ``seconds`` together.

    Those between CPU workers are measured with the workers. Raises :class:`InputError` for a GPU without memory left.
    """
    pairs = [
        (first, second)
        for first, second in permutations(bindings, 2)
        if isinstance(first.hardware, CudaDevice) or isinstance(second.hardware, CudaDevice)
    ]
    if not pairs:
        return ()
    from tessera_core.profile.measure.cuda_links import measure_copies  # late: it needs torch

    links = []
    for first, second in pairs:
        progress(f"copies from {first.type.name} to {second.type.name}")
        ends = _copied(first.hardware), _copied(second.hardware)
        link = measure_copies(*ends, (first.type.name, second.type.name), seconds / len(pairs))
        links.append(replace(link, dated=_now()))
    return tuple(links)


def _copied(hardware: Hardware | None) -> str:
    """What PyTorch calls the memory that a device's copies start or end in."""
    return hardware.torch_name if isinstance(hardware, CudaDevice) else "cpu"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _another_cpu(cpu: CpuDevice) -> CpuDevice | None:
    """A second CPU for the far end of a link; None where this process may use only one."""
    others = [index for index in range(len(usable_cpus())) if index != cpu.index]
    return replace(cpu, index=others[0], number=usable_cpus()[others[0]]) if others else None
