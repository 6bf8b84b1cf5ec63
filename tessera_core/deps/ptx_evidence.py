"""What a captured target's PTX proves about the kernels' accesses, in place of what was declared for that target.

Pointers reach a launch through its parameters only: a table of pointers in memory could not be relocated, so a
program with one can't be replayed elsewhere at all. An access whose base is unknown therefore stays within the
buffers that the launch is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera_core.deps.accesses import Step, Touch, fold_kernel, op_step
from tessera_core.deps.graph import Access
from tessera_core.program.boxes import Box, ByteSet, covers
from tessera_core.program.ir import Kernel, Op, Program, Trace
from tessera_core.ptx.analysis import LaunchAnalysis, LaunchShape, PtxAccess, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module
from tessera_formats.bundle import Bundle
from tessera_formats.errors import ArtifactError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEvidence:
    """A target's own accesses: ``accesses[program]`` for exactly the kernels in ``kernels[program]``.

    ``fallbacks``: (kernels, reason) of what could not be bounded or analysed, most frequent first.
    """

    target: str
    accesses: Mapping[int, tuple[Access, ...]]
    kernels: Mapping[int, frozenset[int]]
    modules: tuple[str, ...]
    unknown_opcodes: tuple[str, ...]
    fallbacks: tuple[tuple[int, str], ...]


def target_evidence(trace: Trace, bundle: Bundle, target: str) -> TargetEvidence:
    """Analyse every launch of ``target``; equal launches of one module are analysed once.

    Raises PtxSyntaxError for a module that is not PTX, and ModelError where a declaration and the PTX
    contradict each other, naming kernel, parameter and line.
    """
    return _Analyser(trace, bundle, target).run()


@dataclass(slots=True)
class _Analyser:
    trace: Trace
    bundle: Bundle
    target: str
    modules: dict[str, Module] = field(default_factory=dict)
    results: dict[tuple[object, ...], LaunchAnalysis] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    reasons: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))

    def run(self) -> TargetEvidence:
        texts = {
            row["module"]: row["text"]
            for row in self.bundle.table(f"targets/{self.target}/modules").to_pylist()
            if row["language"] == "ptx"
        }
        launches: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for row in self.bundle.table(f"targets/{self.target}/launches").to_pylist():
            launches[row["program"], row["kernel"]].append(row)
        accesses: dict[int, list[Access]] = defaultdict(list)
        kernels: dict[int, set[int]] = defaultdict(set)
        for (program_id, kernel_id), rows in sorted(launches.items()):
            program = self.trace.programs[program_id]
            kernel = program.kernels[kernel_id]
            steps = self._steps(program, kernel, sorted(rows, key=lambda r: int(r["launch"])), texts)
            if steps is not None:
                accesses[program_id].extend(fold_kernel(program_id, kernel_id, steps, self.target))
                kernels[program_id].add(kernel_id)
        counted = [(len(found), reason) for reason, found in self.reasons.items()]
        return TargetEvidence(
            target=self.target,
            accesses={program: tuple(found) for program, found in accesses.items()},
            kernels={program: frozenset(found) for program, found in kernels.items()},
            modules=tuple(sorted(self.modules)),
            unknown_opcodes=tuple(sorted(self.unknown)),
            fallbacks=tuple(sorted(counted, key=lambda pair: (-pair[0], pair[1]))),
        )

    def _steps(
        self, program: Program, kernel: Kernel, rows: Sequence[dict[str, Any]], texts: Mapping[str, str]
    ) -> list[Step] | None:
        """The kernel's launches in order, ops without launches between them; None: the ops' evidence stays."""
        for row in rows:
            if row["kind"] != "kernel" or row["module"] not in texts:
                what = "a copy or fill" if row["kind"] != "kernel" else "no PTX"
                self.reasons[f"launch of {row['function']}: {what}, schema used"].add((program.id, kernel.id))
                return None
        by_op: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_op[row["op"]].append(row)
        if None in by_op:  # launches of a fused kernel stand for all its ops
            declared = [touch for op in kernel.ops for touch in op_step(self.trace, program.ops[op])]
            return [self._launch(program, kernel, None, row, texts, declared) for row in rows]
        steps: list[Step] = []
        for op_id in kernel.ops:
            op = program.ops[op_id]
            declared = list(op_step(self.trace, op))
            found = [self._launch(program, kernel, op, row, texts, declared) for row in by_op.pop(op_id, [])]
            if found and op.target.startswith("triton."):
                self._check_filled(program, kernel, op, declared, found)
            steps.extend(found or [declared])
        if by_op:
            raise ArtifactError(
                f"{self.bundle.path}: target {self.target} has launches of ops {sorted(map(str, by_op))} in kernel"
                f" {kernel.id} of {program.name}, which holds no such op; trace again"
            )
        return steps

    def _launch(
        self,
        program: Program,
        kernel: Kernel,
        op: Op | None,
        row: dict[str, Any],
        texts: Mapping[str, str],
        declared: Sequence[Touch],
    ) -> Step:
        name = row["module"]
        if name not in self.modules:
            self.modules[name] = parse_module(texts[name], f"{self.target} module {name[:19]}")
        module = self.modules[name]
        relocations = [Relocation(r["offset"], r["buffer"], r["byte_offset"]) for r in row["relocations"]]
        buffers = list(dict.fromkeys([r.buffer for r in relocations] + [touch.buffer for touch in declared]))
        analysis = self._analyse(module, name, row, relocations, buffers)
        for variable, line in analysis.written_variables:
            raise ModelError(
                f"{program.name}: kernel {kernel.id} ({kernel.name}): the PTX for {self.target} writes the module"
                f" variable {variable} (line {line} of {row['function']}), through which kernels could depend on each"
                " other unseen; pass it as a tensor argument and trace again"
            )
        self.unknown.update(analysis.unknown_opcodes)
        for reason in analysis.fallbacks:
            place = f"{row['function']}: {reason}, module {name[:19]}"
            self.reasons[place].add((program.id, kernel.id))
        step: list[Touch] = []
        for local in analysis.accesses:
            buffer = buffers[local.buffer]
            if local.precision == "bounded":  # the reasons of fallbacks are the launch's own
                self.reasons[f"{row['function']}: {_why(name, local)}"].add((program.id, kernel.id))
            if local.precision != "fallback":
                self._check_declared(program, kernel, op, row, module, relocations, local, buffer, declared)
            step.append(
                Touch(
                    buffer=buffer,
                    mode=local.mode,
                    must=local.must and local.mode == "write",
                    boxes=local.boxes,
                    evidence="ptx",
                    precision=local.precision,
                    detail="" if local.precision == "exact" else _why(name, local),
                )
            )
        return step

    def _analyse(
        self,
        module: Module,
        name: str,
        row: dict[str, Any],
        relocations: Sequence[Relocation],
        buffers: Sequence[int],
    ) -> LaunchAnalysis:
        """The analysis with buffers numbered by their place in ``buffers``, so that repeated layers share it."""
        number = {buffer: index for index, buffer in enumerate(buffers)}
        shape = LaunchShape(
            entry=row["function"],
            grid=_three(row["grid"]),
            block=_three(row["block"]),
            shared_bytes=row["shared_bytes"],
            parameters=row["parameters"],
            relocations=tuple(Relocation(r.offset, number[r.buffer], r.byte_offset) for r in relocations),
        )
        sizes = tuple(self.trace.buffers[buffer].bytes for buffer in buffers)
        key = (name, shape, sizes)
        if key not in self.results:
            self.results[key] = analyse_launch(module, shape, dict(enumerate(sizes)))
        return self.results[key]

    def _check_declared(
        self,
        program: Program,
        kernel: Kernel,
        op: Op | None,
        row: dict[str, Any],
        module: Module,
        relocations: Sequence[Relocation],
        found: PtxAccess,
        buffer: int,
        declared: Sequence[Touch],
    ) -> None:
        """Refuse what the declaration denies: elsewhere the op runs by its declaration, which would then be wrong.

        A write must be declared, and where the PTX gives its exact bytes, to these. A read must be of a buffer that
        is declared at all: what is written may also be read back.
        """
        same = [t for t in declared if t.buffer == buffer and t.valid_for == "shapes"]
        if found.mode == "read":
            if same:
                return
            problem = "reads it, but no access to it is declared"
        else:
            writes = [t for t in same if t.mode == "write"]
            if any(t.boxes is None for t in writes):
                return
            allowed = [box for t in writes for box in t.boxes or ()]
            if not writes:
                problem = "writes it, but it is declared as only read" if same else "writes it undeclared"
            elif found.precision == "exact" and any(_escapes(box, allowed) for box in found.boxes or ()):
                problem = "writes bytes of it outside what is declared as written"
            else:
                return
        raise ModelError(
            f"{program.name}: kernel {kernel.id} ({kernel.name}), {_parameter(module, row, relocations, buffer)}"
            f" ({self._called(buffer)}): the PTX for {self.target} {problem} (line {found.line} of {row['function']})"
            f"; correct the declaration of {op.target if op else kernel.name} and trace again"
        )

    def _check_filled(
        self, program: Program, kernel: Kernel, op: Op, declared: Sequence[Touch], found: Sequence[Step]
    ) -> None:
        """Refuse a must-write that its own launches can't make; only for launches that are the whole op."""
        for touch in declared:
            if not touch.must or touch.boxes is None or touch.valid_for == "content":
                continue
            writes = [t for step in found for t in step if t.buffer == touch.buffer and t.mode == "write"]
            if any(t.boxes is None for t in writes):
                continue
            allowed = [box for t in writes for box in t.boxes or ()]
            if any(_escapes(box, allowed) for box in touch.boxes):
                raise ModelError(
                    f"{program.name}: kernel {kernel.id} ({kernel.name}) is declared to fill"
                    f" {self._called(touch.buffer)}, but its PTX for {self.target} leaves bytes unwritten;"
                    f" declare {op.target} without must for that argument and trace again"
                )

    def _called(self, buffer: int) -> str:
        return self.trace.buffers[buffer].name or f"buffer {buffer}"


def _escapes(box: Box, allowed: Sequence[Box]) -> bool:
    """Whether some byte of ``box`` certainly lies outside ``allowed``; false where there are too many rows to say."""
    if covers(allowed, box):
        return False
    mine, theirs = ByteSet.of([box]), ByteSet.of(allowed)
    return mine is not None and theirs is not None and bool(mine - theirs)


def _why(module: str, access: PtxAccess) -> str:
    return f"{access.reason} (module {module[:19]}, line {access.line})"


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1, 1)[:3]
    return x, y, z


def _parameter(module: Module, row: dict[str, Any], relocations: Sequence[Relocation], buffer: int) -> str:
    """The parameters that point into ``buffer``, as the entry numbers and names them."""
    entry = next(f for f in module.entries() if f.name == row["function"])
    offsets = {offset: name for name, offset in entry.parameter_offsets().items()}
    order = sorted(offsets)
    named = [
        f"argument {order.index(r.offset)} ({offsets[r.offset]})"
        for r in relocations
        if r.buffer == buffer and r.offset in offsets
    ]
    return ", ".join(named) or "a structure argument"
