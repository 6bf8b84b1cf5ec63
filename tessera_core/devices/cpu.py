"""CPU workers: ``cpu:K`` is one thread, pinned to the K-th CPU that this process may use."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tessera_formats.errors import InputError

_NAME = re.compile(r"cpu:(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """One CPU worker: its index among the usable CPUs, and the operating system's number of that CPU."""

    index: int
    number: int

    @property
    def name(self) -> str:
        """How bindings call it."""
        return f"cpu:{self.index}"

    def pin(self) -> None:
        """Bind the calling thread, and all that it starts later, to this CPU."""
        os.sched_setaffinity(0, {self.number})


def cpu_device(name: str) -> CpuDevice:
    """The device ``cpu:K``.

    Raises :class:`InputError` where ``name`` has another form, or fewer than K + 1 CPUs may be used.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(f"hardware {name!r}: only CPU workers are supported here; write it as cpu:0")
    numbers = usable_cpus()
    index = int(match[1])
    if index >= len(numbers):
        last = f"cpu:0 to cpu:{len(numbers) - 1}" if len(numbers) > 1 else "cpu:0"
        raise InputError(f"hardware {name}: this process may use {len(numbers)} CPUs, so name {last}")
    return CpuDevice(index, numbers[index])


def usable_cpus() -> tuple[int, ...]:
    """Numbers of the CPUs that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model as the kernel reports it, or ``unknown CPU``."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown CPU"
    lines = [line.partition(":") for line in text.split("\n\n")[0].splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    name = fields.get("model name", "unknown CPU")
    family, model = fields.get("cpu family"), fields.get("model")
    return f"{name} (family {family} model {model})" if family and model else name
