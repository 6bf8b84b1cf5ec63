"""Which links of a machine a probe measures, and with what: one measurement for each way that bytes can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations, product

from tessera_core.devices.cpu import CpuDevice
from tessera_core.devices.here import Unit
from tessera_core.profile.times import LinkRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way that bytes can take, to be measured.

    ``pairs``: the directed links of the file that it is, by device or type. ``stated``: whether a plan should use it
    there, or why not, where another transport joins the same pair.
    """

    what: str
    pairs: tuple[tuple[str, str], ...]
    measure: Callable[[float], LinkRow]
    why_not: str = ""

    @property
    def stated(self) -> bool:
        """Whether the file states it as the pairs' link."""
        return not self.why_not


def ways_between(units: Sequence[Unit]) -> list[Way]:
    """Every way between the devices of one machine."""
    workers = [unit for unit in units if unit.cpu is not None]
    gpus: dict[int, list[Unit]] = {}
    for unit in units:
        if unit.gpu is not None:
            gpus.setdefault(unit.gpu.index, []).append(unit)
    ways = _between_workers(workers)
    for index, parts in gpus.items():
        if len(parts) > 1:
            ways.append(_copies(f"cuda:{index}", f"cuda:{index}", parts, parts))
        if workers:
            ways.append(_copies(f"cuda:{index}", "cpu", parts, workers))
            ways.append(_copies("cpu", f"cuda:{index}", workers, parts))
    for first, second in permutations(gpus, 2):
        ways.append(_copies(f"cuda:{first}", f"cuda:{second}", gpus[first], gpus[second]))
    for first, second in combinations(gpus, 2):
        ways.append(_nccl(gpus[first][0], gpus[second][0]))
    return ways


def _between_workers(workers: Sequence[Unit]) -> list[Way]:
    """Through shared memory, as runs do, and by gloo; measured between the first two, taken for every pair."""
    cpus = [unit.cpu for unit in workers if unit.cpu is not None]
    if len(cpus) < 2:
        return []
    kind = workers[0].type
    pair = f"{workers[0].name} to {workers[1].name}"
    return [
        Way(
            what=f"{pair} through shared memory",
            pairs=((kind, kind),),
            measure=partial(_shared_memory, cpus[0], cpus[1], kind),
        ),
        Way(
            what=f"{pair} by gloo",
            pairs=((kind, kind),),
            measure=partial(_gloo, cpus[0], cpus[1], kind),
            why_not="workers of one host use shared memory",
        ),
    ]


def _copies(source: str, destination: str, senders: Iterable[Unit], receivers: Iterable[Unit]) -> Way:
    senders, receivers = list(senders), list(receivers)
    ends = [(_end(a), _end(b)) for a, b in product(senders, receivers) if a.name != b.name]
    return Way(
        what=f"{source} to {destination}",
        pairs=tuple(dict.fromkeys(ends)),
        measure=partial(_copy, source, destination, (senders[0].type, receivers[-1].type)),
    )


def _end(unit: Unit) -> str:
    """How links name it: a GPU by itself, CPU workers by their type, as all are alike."""
    return unit.type if unit.cpu is not None else unit.name


def _nccl(first: Unit, second: Unit) -> Way:
    ends = [(unit.hardware.partition("/")[0], unit.type) for unit in (first, second)]
    return Way(
        what=f"{ends[0][0]} to {ends[1][0]} by NCCL",
        pairs=((first.name, second.name),),
        measure=partial(_messages_between_gpus, ends),
        why_not="one process copies between its GPUs itself",
    )


def _shared_memory(sender: CpuDevice, receiver: CpuDevice, kind: str, seconds: float) -> LinkRow:
    from tessera_core.profile.measure.links_shared_memory import measure_link

    return measure_link(sender, receiver, kind, seconds)


def _gloo(sender: CpuDevice, receiver: CpuDevice, kind: str, seconds: float) -> LinkRow:
    from tessera_core.profile.measure.links_distributed import End, measure_messages

    ends = [End(name=cpu.name, device_type=kind, cpu=cpu) for cpu in (sender, receiver)]
    return measure_messages(ends[0], ends[1], "gloo", seconds)


def _messages_between_gpus(ends: Sequence[tuple[str, str]], seconds: float) -> LinkRow:
    from tessera_core.profile.measure.links_distributed import End, measure_messages

    sender, receiver = (End(name=name, device_type=kind, gpu=name) for name, kind in ends)
    return measure_messages(sender, receiver, "nccl", seconds)


def _copy(source: str, destination: str, types: tuple[str, str], seconds: float) -> LinkRow:
    from tessera_core.profile.measure.cuda_links import measure_copies

    return measure_copies(source, destination, types, seconds)
