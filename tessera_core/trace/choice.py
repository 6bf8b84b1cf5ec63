"""What a call of the trace stage asks for, and which stage does it: tracing a model, importing a recorded profile,
or adding targets to a trace that exists.

What a kind of input has no use for is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tessera_core.report.facts import Facts
from tessera_core.trace.inputs import InputKind, input_kind
from tessera_core.trace.request import ProgramRequest, parse_program
from tessera_formats.errors import UsageError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """The options of a call, as the stages that they choose among describe them.

    ``model``: a catalogue name, ``FILE.py:FACTORY``, a ``.pt2``, a profile, or a trace folder. ``programs``: texts as
    :func:`parse_program` reads them; ``phase``, ``batch`` and ``context`` are one more.
    """

    model: str
    output: Path | None
    programs: tuple[str, ...]
    phase: str | None
    batch: int
    context: int | None
    dtype: str | None
    seed: int
    fake: bool
    tensor_parallel: str | None
    rank: int
    ptx_targets: tuple[str, ...]
    capture: str | None
    no_compile: bool
    add_targets: tuple[Path, ...]
    execution_trace: Path | None
    iteration: int | None
    gpu_type: str | None
    catalogues: tuple[Path, ...]
    trust_model: bool

    def run(self, progress: Progress = lambda message: None) -> Facts:
        """Do what is asked for; raises :class:`UsageError` for options that don't go together, and what the chosen
        stage raises.
        """
        if self.no_compile and self.capture is None:
            raise UsageError("--no-compile says how to --capture; name the device too")
        if (Path(self.model) / "manifest.toml").is_file():
            return self._add(progress)
        if self.output is None:
            raise UsageError("name the trace folder to write: -o")
        kind = input_kind(self.model)
        requests = self._requests(needed=kind == "model")
        if kind == "kineto":
            return self._import(self.output, requests, progress)
        return self._trace(self.output, kind, requests, progress)

    def _add(self, progress: Progress) -> Facts:
        """New targets in a trace that exists."""
        if self.capture is None and not self.add_targets:
            raise UsageError(f"{self.model} is a trace: say what to add, --capture or --add-target")
        useless = given({**self._naming(), **self._making(), **self._recorded()})
        if useless:
            raise UsageError(f"{self.model} is a trace, which stays as it is: drop {useless}")
        from tessera_core.trace.capture.stage import CaptureStage

        stage = CaptureStage(
            device=self.capture,
            compiled=not self.no_compile,
            trusted=self.trust_model,
            add_targets=self.add_targets,
        )
        return stage.run(Path(self.model), self.output or Path(self.model), progress)

    def _import(self, output: Path, requests: tuple[ProgramRequest, ...], progress: Progress) -> Facts:
        """A recorded profile."""
        targets = {"--capture": self.capture, "--add-target": self.add_targets}
        useless = given({**self._making(), **targets})
        if useless or len(requests) > 1:
            drop = useless or "all programs but one"
            raise UsageError(f"a profile has one program, and kernels of one GPU as they were: drop {drop}")
        from tessera_core.trace.inputs.stage import RecordedStage

        stage = RecordedStage(
            path=Path(self.model),
            execution_trace=self.execution_trace,
            program=requests[0] if requests else None,
            iteration=self.iteration,
            gpu_type=self.gpu_type,
            catalogues=self.catalogues,
        )
        return stage.run(output, progress)

    def _trace(
        self, output: Path, kind: InputKind, requests: tuple[ProgramRequest, ...], progress: Progress
    ) -> Facts:
        """A model in code or an exported program, and the captures that are wanted besides."""
        useless = given(self._recorded())
        if useless:
            raise UsageError(f"{useless}: for a profile (.json), and {self.model} is none")
        if kind == "export" and self.seed:
            raise UsageError(f"--seed is for random weights, and {self.model} has its own: drop it")
        from tessera_core.trace.capture.stage import CaptureStage
        from tessera_core.trace.stage import TraceStage

        adding = CaptureStage(
            device=self.capture,
            compiled=not self.no_compile,
            trusted=True,  # tracing a model has run its code already
            add_targets=self.add_targets,
        )
        stage = TraceStage(
            model=self.model,
            programs=requests,
            dtype=self.dtype,
            seed=self.seed,
            fake=self.fake,
            tensor_parallel=self.tensor_parallel,
            rank=self.rank,
            ptx_targets=self.ptx_targets,
            capture=adding if self.capture is not None or self.add_targets else None,
        )
        return stage.run(output, progress)

    def _requests(self, *, needed: bool) -> tuple[ProgramRequest, ...]:
        """The programs of both forms; none at all only where they are not ``needed``."""
        texts = self.programs
        if self.phase is None:
            useless = given({"--batch": self.batch > 1, "--context": self.context})
            if useless:
                raise UsageError(f"{useless}: goes with --phase; or name it all in --program")
        elif self.context is None:
            raise UsageError("--phase needs --context too")
        else:
            texts = (*texts, f"{self.phase}:batch={self.batch},context={self.context}")
        if needed and not texts:
            raise UsageError("name what to record: --program, or --phase, --batch and --context")
        return tuple(parse_program(text) for text in texts)

    def _naming(self) -> Mapping[str, object]:
        """Options that say which programs."""
        return {
            "--program": self.programs,
            "--phase": self.phase,
            "--batch": self.batch > 1,
            "--context": self.context,
        }

    def _making(self) -> Mapping[str, object]:
        """Options that say how a model is made and traced."""
        return {
            "--dtype": self.dtype,
            "--seed": self.seed > 0,
            "--fake": self.fake,
            "--tensor-parallel": self.tensor_parallel,
            "--rank": self.rank > 0,
            "--ptx-target": self.ptx_targets,
        }

    def _recorded(self) -> Mapping[str, object]:
        """Options that say what of a profile."""
        return {
            "--execution-trace": self.execution_trace,
            "--iteration": self.iteration,
            "--gpu-type": self.gpu_type,
            "--catalogue": self.catalogues,
        }


def given(options: Mapping[str, object]) -> str:
    """The names of those that were given: whose value is not the one that stands for nothing."""
    return ", ".join(
        name for name, value in options.items() if value is not None and value is not False and value != ()
    )
