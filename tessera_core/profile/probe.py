"""The probe stage: a cluster file for the machine at hand.

Devices are what is here and catalogued: GPUs, whole or cut into slices, and CPU workers of one thread. Memory is what
is free now. Links are measured with the transports that a run uses; what can't be measured is left out and said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

from tessera_core.devices.cpu import CpuDevice, processor_name, usable_cpus
from tessera_core.devices.here import FoundGpu, Unit, available_memory_bytes, found_gpus, has_nvidia_driver
from tessera_core.profile.catalogue import Catalogue, catalogue
from tessera_core.profile.facts import LINK_FIGURES, link_figures
from tessera_core.profile.probe_links import Way, ways_between
from tessera_core.profile.times import LinkRow
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.cluster import write_cluster
from tessera_formats.errors import InputError, TesseraError

CPU_TYPE = "cpu-1thread"

MEMORY_SHARE = 0.9
"""Of the memory that is available, the part that is stated: the system and the workers themselves want some."""

_WIDTH = 108  # of a comment, after which it is broken


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStage:
    """Look at this machine, and measure its links for about ``seconds``, start-up of processes aside.

    ``cpus``: CPU workers; None: all usable CPUs where there is no GPU, else none. ``slices``: multiprocessors of each
    slice that every GPU is cut into; empty: GPUs are whole. ``host``: what the file calls the machine. ``measure``:
    whether links are timed. ``catalogues``: files of users' device types.
    """

    cpus: int | None = None
    slices: tuple[int, ...] = ()
    host: str = "host0"
    seconds: float = 10.0
    measure: bool = True
    catalogues: tuple[Path, ...] = ()

    def run(self, output: Path | str, progress: Callable[[str], None] = lambda _: None) -> Facts:
        """Write the cluster file to ``output`` (``-``: standard output).

        Raises :class:`InputError` where there is nothing to compute on, more CPUs are asked for than there are,
        slices that a GPU can't be cut into, or a host without a name. Nothing is written then.
        """
        if not self.host.strip() or not self.host.isprintable():
            raise InputError(f"--host {self.host!r}: is no name; write a word such as host0")
        gpus = found_gpus()
        units, notes = self._units(gpus, catalogue(self.catalogues))
        if not units:
            why = "; ".join(notes) or "no GPU is here, and --cpus 0 leaves the CPUs out"
            raise InputError(f"probe: finds no device to list ({why}); add --cpus 1")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        links: list[dict[str, Any]] = []
        measured: list[tuple[Way, LinkRow]] = []
        ways = ways_between(units)
        if self.measure:
            for way in ways:
                progress(f"probe: {way.what}")
                try:
                    measured.append((way, way.measure(self.seconds / len(ways))))
                except TesseraError as problem:
                    notes.append(f"{way.what}: not measured: {problem}")
        elif ways:
            notes.append("links were not measured (--no-measure); a plan needs a [[link]] for every pair")
        for way, row in measured:
            if way.stated:
                links += [link_row(ends, row, now) for ends in way.pairs]
        content = {"device": [unit.row(self.host) for unit in units], **({"link": links} if links else {})}
        write_cluster(output, content, _comments(now, units, measured, notes))
        return _facts(self.host, units, measured, notes)

    def _units(self, gpus: Sequence[FoundGpu], known: Catalogue) -> tuple[list[Unit], list[str]]:
        """The devices to list, and a line for each thing that is here but isn't."""
        units: list[Unit] = []
        notes: list[str] = []
        if self.slices and not gpus:
            raise InputError(
                f"--slices {_sum_text(self.slices)}: there is no GPU here that PyTorch can use; leave it out"
            )
        if not gpus and has_nvidia_driver():
            notes.append("GPUs: an NVIDIA driver is loaded, but PyTorch can use none; install one with CUDA")
        for gpu in gpus:
            kind = known.reported(gpu.name)
            if kind is None:
                notes.append(
                    f"{gpu.torch_name} is an {gpu.name}, which the catalogue of {known.date} does not hold"
                )
                continue
            units += self._of_gpu(gpu, kind.name)
        usable = usable_cpus()
        wanted = self.cpus if self.cpus is not None else 0 if gpus else len(usable)
        if wanted > len(usable):
            raise InputError(f"--cpus {wanted}: this process may use {len(usable)} CPUs; ask for as many")
        available = available_memory_bytes()
        if wanted and available is None:
            notes.append(
                "memory of the CPU workers: the system does not say what is available; state memory_gb"
            )
        units += [
            Unit(
                name=f"cpu{index}",
                type=CPU_TYPE,
                memory_bytes=None if available is None else int(available * MEMORY_SHARE),
                domain=self.host,
                hardware=f"cpu:{index}",
                cpu=CpuDevice(index, usable[index]),
            )
            for index in range(wanted)
        ]
        return units, notes

    def _of_gpu(self, gpu: FoundGpu, kind: str) -> list[Unit]:
        """A GPU whole, or its slices: devices that share its memory."""
        total = sum(self.slices)
        if total > gpu.multiprocessors:
            raise InputError(
                f"--slices {_sum_text(self.slices)}: asks for {total} multiprocessors, {gpu.torch_name} has"
                f" {gpu.multiprocessors}; name smaller slices"
            )
        cut = f"{gpu.torch_name}/sm={_sum_text(self.slices)}"
        return [
            Unit(
                name=f"gpu{gpu.index}-{part}" if self.slices else f"gpu{gpu.index}",
                type=f"{kind}/sm={count}" if self.slices else kind,
                memory_bytes=int(gpu.free_bytes * MEMORY_SHARE),
                domain=f"{self.host}-gpu{gpu.index}",
                hardware=f"{cut}#{part}" if self.slices else gpu.torch_name,
                gpu=gpu,
            )
            for part, count in enumerate(self.slices or (gpu.multiprocessors,))
        ]


def parse_slices(text: str) -> tuple[int, ...]:
    """``96+36`` as (96, 36); raises :class:`InputError` for anything else."""
    counts = text.split("+")
    if not all(count.isascii() and count.isdigit() and int(count) for count in counts):
        raise InputError(f"--slices {text}: is no list of multiprocessor counts; write it as 96+36")
    return tuple(int(count) for count in counts)


def link_row(ends: tuple[str, str], row: LinkRow, measured: str) -> dict[str, Any]:
    """A measured link from one device or type to another, as the cluster file states it."""
    return {
        "from": ends[0],
        "to": ends[1],
        "gbit_per_s": round(row.gbit_per_s, 3),
        "latency_us": round(row.latency_us, 3),
        "send_us": round(row.send_us, 3),
        "receive_us": round(row.receive_us, 3),
        "occupies_sender": row.occupies_sender,
        "transport": row.transport,
        "residual": round(row.residual, 4),
        "measured": measured,
    }


def _comments(
    now: str, units: Sequence[Unit], measured: Sequence[tuple[Way, LinkRow]], notes: Sequence[str]
) -> list[str]:
    lines = [
        f"Written by tessera probe, {now}. Memory is {MEMORY_SHARE:.0%} of what was free then; devices of one"
        " memory_domain share it.",
    ]
    if any(unit.cpu is not None for unit in units):
        lines.append(f"CPU: {processor_name()}.")
    lines += [
        f"{gpu.torch_name}: {gpu.name}, {gpu.multiprocessors} multiprocessors."
        for gpu in dict.fromkeys(unit.gpu for unit in units)
        if gpu is not None
    ]
    for way, row in measured:
        use = "" if way.stated else f" (not stated below; {way.why_not})"
        lines.append(
            f"{way.what}: {row.transport}, {row.transfer_us(0):.1f} us and {row.gbit_per_s:.1f} Gbit/s{use};"
            f" {row.detail}."
        )
    lines += [f"Left out: {note}." for note in notes]
    return [part for line in lines for part in wrap(line, _WIDTH, subsequent_indent="  ")]


def _facts(
    host: str, units: Sequence[Unit], measured: Sequence[tuple[Way, LinkRow]], notes: Sequence[str]
) -> Facts:
    devices = FactTable(
        "devices",
        ("name", "type", "hardware", "memory_gb", "memory_domain"),
        tuple(
            (unit.name, unit.type, unit.hardware, unit.row(host).get("memory_gb"), unit.domain)
            for unit in units
        ),
    )
    links = FactTable(
        "links",
        ("link", "transport", "stated", *LINK_FIGURES),
        tuple((way.what, row.transport, way.stated, *link_figures(row)) for way, row in measured),
    )
    left_out = FactTable("left out", ("what",), tuple((note,) for note in notes))
    tables = (devices, *((links,) if measured else ()), *((left_out,) if notes else ()))
    return Facts("probe", {"host": host, "devices": len(units)}, tables)


def _sum_text(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts))
