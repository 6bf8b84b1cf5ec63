"""``--device TYPE[=HARDWARE]``: a device type of the profile, and the hardware here that stands for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tessera_core.devices.cpu import CpuDevice, cpu_device
from tessera_core.devices.cuda import CudaDevice, check_bound, cuda_device
from tessera_core.profile.catalogue import Catalogue, DeviceType
from tessera_formats.errors import InputError

Hardware: TypeAlias = CpuDevice | CudaDevice

_HARDWARE = re.compile(r"=(?=(?:cpu|cuda):)")
"""Type names hold ``=`` as well (``h200-sxm/sm=96``), hardware begins with its kind."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A device type of the profile, and the hardware to measure it on (None: it is not measured here)."""

    type: DeviceType
    hardware: Hardware | None


def parse_hardware(text: str) -> Hardware:
    """Read ``cpu:K``, ``cuda:N`` or a slice ``cuda:0/sm=96+36#1``; raises :class:`InputError` where it is not here."""
    return cuda_device(text) if text.startswith("cuda:") else cpu_device(text)


def parse_binding(text: str, known: Catalogue) -> Binding:
    """Read ``TYPE`` or ``TYPE=HARDWARE``.

    Raises :class:`InputError` for an unknown type, hardware that is not here, or a type of other hardware.
    """
    name, *after = _HARDWARE.split(text, maxsplit=1)
    base, equals, other = name.partition("/")[0].partition("=")
    if equals:
        raise InputError(f"device {text}: {other!r} is no hardware; write {base}=cpu:0, or {base} alone")
    kind = known.type(name)
    if not after:
        return Binding(kind, None)
    hardware = parse_hardware(after[0])
    if isinstance(hardware, CpuDevice) and kind.kind != "cpu":
        raise InputError(
            f"device {text}: {name} is a {kind.kind.upper()}, {hardware.name} is not;"
            f" write --device {name} to model it, or --device cpu-1thread={hardware.name}"
        )
    if kind.dtype is not None:
        raise InputError(
            f"device {text}: what is measured computes in the model's dtype; write --device {name} to look it up or"
            f" model it"
        )
    if isinstance(hardware, CudaDevice):
        check_bound(text, kind.base, hardware, known)
        _check_slice(text, kind, hardware)
    return Binding(kind, hardware)


def parse_bindings(texts: Sequence[str], beside: str | None, known: Catalogue) -> tuple[Binding, ...]:
    """All of ``texts``; ``beside``: hardware that is to be busy meanwhile.

    Raises :class:`InputError` as :func:`parse_binding` does, for a type that is named twice, and for a ``beside``
    that does not go with what is measured.
    """
    bindings = tuple(parse_binding(text, known) for text in texts)
    names = [binding.type.name for binding in bindings]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"device type {name}: is named {names.count(name)} times; name it once")
    if beside is not None:
        _check_beside(beside, [binding.hardware for binding in bindings if binding.hardware is not None])
    return bindings


def beside_of(hardware: Hardware, beside: str | None, measured: Sequence[Hardware]) -> Hardware | None:
    """What is busy while ``hardware`` is measured: what ``beside`` names, or another measured slice of the same cut."""
    if beside is None:
        return None
    named = parse_hardware(beside)
    if isinstance(hardware, CpuDevice):
        return named if isinstance(named, CpuDevice) else None
    candidates = [named, *measured]
    return next((o for o in candidates if isinstance(o, CudaDevice) and hardware.is_beside(o)), None)


def _check_beside(beside: str, measured: Sequence[Hardware]) -> None:
    other = parse_hardware(beside)
    alike = [hardware for hardware in measured if type(hardware) is type(other)]
    if not alike:
        example = "cpu-1thread=cpu:0" if isinstance(other, CpuDevice) else "h200-sxm/sm=96=cuda:0/sm=96+36#0"
        raise InputError(f"--beside {beside}: nothing of its kind is measured; add --device {example}")
    if isinstance(other, CpuDevice):
        if other in alike:
            raise InputError(f"--beside {beside}: is what is measured itself; name another CPU")
    elif not any(isinstance(hardware, CudaDevice) and hardware.is_beside(other) for hardware in alike):
        raise InputError(
            f"--beside {beside}: is no other slice of what is measured; name one that differs only in what follows #"
        )


def _check_slice(text: str, kind: DeviceType, device: CudaDevice) -> None:
    """A slice stands for a type of as many multiprocessors, a whole GPU for a whole type."""
    count = device.multiprocessors
    if count is None and kind.multiprocessors < kind.whole_multiprocessors:
        rest = kind.whole_multiprocessors - kind.multiprocessors
        raise InputError(
            f"device {text}: {device.name} is a whole GPU; write"
            f" {kind.name}={device.name}/sm={kind.multiprocessors}+{rest}#0"
        )
    if count is not None and count != kind.multiprocessors:
        raise InputError(
            f"device {text}: {device.name} has {count} multiprocessors; write {kind.base}/sm={count}={device.name}"
        )
