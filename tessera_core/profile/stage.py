"""The profile stage: a time for every kernel signature of a trace on every device type asked for.

Per kernel and type the most trusted source that has a time counts: measured on hardware here, recorded by a profiler,
looked up in published tables, modelled. Profiles made before, elsewhere, are merged in, or lend their times to the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tessera_core.profile.binding import Binding, parse_bindings
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.facts import Answer, profile_facts
from tessera_core.profile.merge import merge_profiles, profile_content
from tessera_core.profile.question import Question
from tessera_core.profile.sources import Looked, modelled, modelled_device, recorded, silicon
from tessera_core.profile.times import Condition, DeviceRow, TimeRow
from tessera_core.program.guards import check_replayable
from tessera_core.program.ir import Trace
from tessera_core.program.store import trace_from_bundle
from tessera_core.report.facts import Facts
from tessera_formats.artifact import TableArtifact
from tessera_formats.errors import InputError
from tessera_formats.profile import read_profile, write_profile
from tessera_formats.trace import check_same_program, read_trace

if TYPE_CHECKING:
    from tessera_core.profile.measure.bound import MeasuredType


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStage:
    """Times for ``devices``, each ``TYPE`` or ``TYPE=HARDWARE``.

    ``beside``: hardware that runs the same work meanwhile, for times under the conditions "beside" and "copies".
    ``trust``: import user code that the trace names. ``seconds``: time to spend on measuring. ``merged``: profiles of
    the same trace whose times are taken in. ``references``: profiles whose times the model carries over to other
    types. ``catalogues``: files of users' device types. ``tables``: look times up in published tables.
    """

    devices: tuple[str, ...] = ()
    beside: str | None = None
    trust: bool = False
    seconds: float = 20.0
    merged: tuple[Path | str, ...] = ()
    references: tuple[Path | str, ...] = ()
    catalogues: tuple[Path, ...] = ()
    tables: bool = True

    def run(self, trace: Path, output: Path | str, progress: Callable[[str], None] = lambda _: None) -> Facts:
        """Profile ``trace`` and write the artifact to ``output`` (``-``: standard output).

        Raises :class:`InputError` for device types, hardware or a trace that cannot be profiled so,
        :class:`OriginError` for profiles of another program, and :class:`DeviceLostError` where a measuring worker
        dies. Nothing is written then.
        """
        bindings = self._bindings()
        bundle = read_trace(trace)
        question = Question.of(trace_from_bundle(bundle), bundle, catalogue(self.catalogues))
        taken_in = _profiles(self.merged, trace, question.trace)
        answer = self._answer(question, trace, bindings, progress)
        header, table = profile_content(question.trace.digest, answer.rows, answer.links, answer.devices)
        if taken_in:
            times = merge_profiles({"now": TableArtifact(header, table), **taken_in})
            answer = replace(
                answer,
                rows=[row for rows in times.rows.values() for row in rows],
                links=times.every_link,
                devices=list(times.devices.values()),
                conflicts=times.conflicts,
            )
            header, table = profile_content(question.trace.digest, answer.rows, answer.links, answer.devices)
        write_profile(output, header, table)
        return profile_facts(question, answer)

    def _bindings(self) -> tuple[Binding, ...]:
        if not self.devices and not self.merged:
            raise InputError(
                "no device was named; add --device TYPE, or --device cpu-1thread=cpu:0 to measure"
            )
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"--seconds {self.seconds}: is not a time; name a number of seconds above 0")
        return parse_bindings(self.devices, self.beside, catalogue(self.catalogues))

    def _answer(
        self, question: Question, path: Path, bindings: Sequence[Binding], progress: Callable[[str], None]
    ) -> Answer:
        measured = self._measured(question, path, bindings, progress)
        rows: list[TimeRow] = []
        devices: list[DeviceRow] = []
        missing: list[str] = []
        for name, found in measured.items():
            missing += [
                f"{name}: {signature} is not measured: {why}" for signature, why in found.unmeasured.items()
            ]
        open_types = [
            binding.type
            for binding in bindings
            if binding.type.name not in measured or measured[binding.type.name].unmeasured
        ]
        looked = silicon(question, open_types) if self.tables else Looked({}, ())
        for binding in bindings:
            name = binding.type.name
            held: dict[str, TimeRow] = {}
            conditions: tuple[Condition, ...] = ("alone",)
            if name in measured:
                found = measured[name]
                conditions = tuple(dict.fromkeys(row.condition for row in found.rows)) or conditions
                timed = [row for row in found.rows if row.signature not in question.joins]
                device = found.device
            else:
                timed, profiled = recorded(question, binding.type)
                device = profiled or modelled_device(question, binding.type)
            held = {row.signature: row for row in timed}
            lookups = [row for (kind, s), row in looked.rows.items() if kind == name and s not in held]
            known = held.keys() | {row.signature for row in lookups}
            rest = [signature for signature in question.kernels if signature not in known]
            rows += [*timed, *lookups]
            for condition in conditions:
                rows += modelled(question, binding.type, rest, condition)
            devices.append(device)
        return Answer(
            rows=rows,
            links=[link for found in measured.values() for link in found.links],
            devices=devices,
            whole={
                (name, *place): time
                for name, found in measured.items()
                for place, time in found.whole.items()
            },
            missing=[*missing, *looked.missing],
        )

    def _measured(
        self, question: Question, path: Path, bindings: Sequence[Binding], progress: Callable[[str], None]
    ) -> dict[str, MeasuredType]:
        """Types that are bound to hardware, by name."""
        bound = [binding for binding in bindings if binding.hardware is not None]
        if not bound:
            return {}
        _check_measurable(question.trace, path)
        from tessera_core.profile.measure.bound import Measurement

        measurement = Measurement(
            trace=question.trace,
            path=path,
            beside=self.beside,
            trust=self.trust,
            seconds=self.seconds / len(bound),
        )
        return {
            binding.type.name: measurement.on_cpu(binding.type.name, binding.hardware, progress)
            for binding in bound
            if binding.hardware is not None
        }


def _profiles(paths: Sequence[Path | str], trace: Path, loaded: Trace) -> dict[str, TableArtifact]:
    """Opened profiles of ``loaded``, by name; raises :class:`OriginError` for one of another program."""
    found = {str(path): read_profile(path) for path in paths}
    check_same_program(
        {str(trace): loaded.digest, **{name: item.header["program_digest"] for name, item in found.items()}}
    )
    return found


def _check_measurable(trace: Trace, path: Path) -> None:
    if trace.info["fake"]:
        raise InputError(
            f"{path}: was traced with --fake, so there are no values to measure with;"
            " trace without --fake, or name device types without =HARDWARE to model them"
        )
    check_replayable(trace, path, "name device types without =HARDWARE to model them")
