"""``--device TYPE[=HARDWARE]``: a device type of the profile, and the hardware here that stands for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.devices.cpu import CpuDevice, cpu_device
from tessera_core.profile.catalogue import Catalogue, DeviceType
from tessera_formats.errors import InputError

_HARDWARE = re.compile(r"=(?=(?:cpu|cuda):)")
"""Type names hold ``=`` as well (``h200-sxm/sm=96``), hardware begins with its kind."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A device type of the profile, and the hardware to measure it on (None: it is not measured here)."""

    type: DeviceType
    hardware: CpuDevice | None


def parse_binding(text: str, known: Catalogue) -> Binding:
    """Read ``TYPE`` or ``TYPE=HARDWARE``.

    Raises :class:`InputError` for an unknown type, hardware that is not here, or a type of another kind.
    """
    name, *hardware = _HARDWARE.split(text, maxsplit=1)
    base, equals, other = name.partition("/")[0].partition("=")
    if equals:
        raise InputError(f"device {text}: {other!r} is no hardware; write {base}=cpu:0, or {base} alone")
    kind = known.type(name)
    if not hardware:
        return Binding(kind, None)
    cpu = cpu_device(hardware[0])
    if kind.kind != "cpu":
        raise InputError(
            f"device {text}: {name} is a {kind.kind.upper()}, {hardware[0]} is not;"
            f" write --device {name} to model it, or --device cpu-1thread={hardware[0]}"
        )
    return Binding(kind, cpu)


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
        other = cpu_device(beside)
        measured = [binding.hardware for binding in bindings if binding.hardware is not None]
        if not measured:
            raise InputError(f"--beside {beside}: nothing is measured; add --device cpu-1thread=cpu:0")
        if other in measured:
            raise InputError(f"--beside {beside}: is what is measured itself; name another CPU")
    return bindings
