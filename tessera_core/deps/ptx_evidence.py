"""What a captured target's launches prove about the kernels' accesses, in place of what was declared for it.

A launch with PTX is analysed, a copy or fill is known from its words. Of any other launch (a library's binary)
only what it is given is known: it stays within those of its op's declared accesses whose buffers it reaches, and
within those that no launch of the op reaches. Within a kernel, what one launch certainly wrote is not read from
outside by a launch that surely comes later.

Pointers reach a launch through its parameters only: a table of pointers in memory could not be relocated, so a
program with one can't be replayed elsewhere at all. An access whose base is unknown therefore stays within the
buffers that the launch is given.

Scratch memory of a kernel holds nothing that another kernel could see. Scratch of a library stays, but the library
counts on nothing in it from one kernel to the next; where PTX reads it before it writes it, the kernels that may
have written it share a device with the reader, on which they keep their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tessera_core.deps.accesses import Step, Touch, fold_kernel, op_step
from tessera_core.deps.copies import copy_touches
from tessera_core.deps.declared import Declaration
from tessera_core.deps.graph import Access, union_of_chains
from tessera_core.deps.launches import Launch, TargetLaunches, target_launches
from tessera_core.program.ir import Kernel, Op, Program, Trace
from tessera_core.ptx.analysis import (
    BlockFootprint,
    LaunchAnalysis,
    LaunchShape,
    PtxAccess,
    Relocation,
    Split,
    analyse_launch,
)
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module
from tessera_formats.bundle import Bundle
from tessera_formats.errors import ArtifactError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchBlocks:
    """What is known of the single blocks of one analysed launch."""

    program: int
    kernel: int
    launch: int
    footprints: tuple[BlockFootprint, ...]
    split: Split


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEvidence:
    """A target's own accesses: ``accesses[program]`` for exactly the kernels in ``kernels[program]``.

    ``resolved``: accesses that were looked up in stored content. ``chains[program]``: groups of kernels that share
    a device for the sake of scratch memory. ``fallbacks``: (kernels, reason) of what could not be bounded or
    analysed, most frequent first.
    """

    target: str
    accesses: Mapping[int, tuple[Access, ...]]
    kernels: Mapping[int, frozenset[int]]
    chains: Mapping[int, tuple[tuple[int, ...], ...]]
    resolved: int
    blocks: tuple[LaunchBlocks, ...]
    modules: tuple[str, ...]
    unknown_opcodes: tuple[str, ...]
    fallbacks: tuple[tuple[int, str], ...]


def target_evidence(
    trace: Trace, bundle: Bundle, target: str, content: Mapping[int, bytes] | None = None
) -> TargetEvidence:
    """Analyse every launch of ``target``; equal launches of one module are analysed once.

    ``content``: bytes of buffers that nothing writes, in which addresses that depend on data are looked up; what
    they give then is added as valid for the content only.

    Raises PtxSyntaxError for a module that is not PTX, and ModelError where a declaration and the PTX
    contradict each other, naming kernel, parameter and line.
    """
    launches = target_launches(trace, bundle, target)
    return _Analyser(trace, bundle, target, launches, content or {}).run()


@dataclass(slots=True)
class _Analyser:
    trace: Trace
    bundle: Bundle
    target: str
    launches: TargetLaunches
    content: Mapping[int, bytes]
    modules: dict[str, Module] = field(default_factory=dict)
    results: dict[tuple[object, ...], LaunchAnalysis] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    reasons: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    blocks: list[LaunchBlocks] = field(default_factory=list)
    # library scratch: kernels that may read in it what was there before, and kernels that may write it
    carriers: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    spoilers: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))

    def run(self) -> TargetEvidence:
        accesses: dict[int, list[Access]] = defaultdict(list)
        kernels: dict[int, set[int]] = defaultdict(set)
        for (program_id, kernel_id), launches in self.launches.by_kernel.items():
            program = self.trace.programs[program_id]
            kernel = program.kernels[kernel_id]
            for launch in launches:
                if not self._is_known(launch):
                    reason = f"launch of {launch.function}: no PTX, schema used for what it reaches"
                    self.reasons[reason].add((program_id, kernel_id))
                    for buffer in self.launches.carried.intersection(launch.buffers):
                        self.spoilers[program_id, buffer].add(kernel_id)
            if not self._proves(launches):
                continue  # the ops' evidence stays
            steps = self._steps(program, kernel, launches)
            kernels[program_id].add(kernel_id)
            for access in fold_kernel(program_id, kernel_id, steps, self.target):
                if access.buffer < len(self.trace.buffers):
                    accesses[program_id].append(access)
                elif access.buffer in self.launches.carried:
                    self._carry(access)
        counted = [(len(found), reason) for reason, found in self.reasons.items()]
        return TargetEvidence(
            target=self.target,
            accesses={program: tuple(found) for program, found in accesses.items()},
            kernels={program: frozenset(found) for program, found in kernels.items()},
            chains=self._chains(),
            resolved=sum(
                a.valid_for == "content" and a.evidence == "ptx" for f in accesses.values() for a in f
            ),
            blocks=tuple(self.blocks),
            modules=tuple(sorted(self.modules)),
            unknown_opcodes=tuple(sorted(self.unknown)),
            fallbacks=tuple(sorted(counted, key=lambda pair: (-pair[0], pair[1]))),
        )

    def _is_known(self, launch: Launch) -> bool:
        return launch.kind != "kernel" or launch.module in self.launches.texts

    def _proves(self, launches: Sequence[Launch]) -> bool:
        """Whether some launch is known that touches more than scratch."""
        return any(
            launch.kind == "kernel" or any(buffer < len(self.trace.buffers) for buffer in launch.buffers)
            for launch in launches
            if self._is_known(launch)
        )

    def _steps(self, program: Program, kernel: Kernel, launches: Sequence[Launch]) -> list[Step]:
        """The kernel's launches, and the ops without a launch, whose accesses are those of the ops."""
        steps: list[Step] = []
        places: dict[int, int] = {}  # launch -> its place in steps
        ends: list[tuple[int, frozenset[int]]] = []  # what an op did in the end: place, its launches
        for op, found in self._by_op(program, kernel, launches):
            ops = kernel.ops if op is None else (op.id,)
            touches = [touch for number in ops for touch in op_step(self.trace, program.ops[number])]
            if not found:
                steps.append(Step(touches, frozenset() if self.launches.complete else None))
                continue
            declared = Declaration(
                trace=self.trace,
                target=self.target,
                program=program,
                kernel=kernel,
                op=op,
                touches=touches,
            )
            everything = self._is_whole(op)
            hidden = [launch for launch in found if not self._is_known(launch)]
            through = self._through(touches, found, hidden, everything)
            first = len(steps)
            for launch in found:
                places[launch.number] = len(steps)
                if self._is_known(launch):
                    touched = self._known(declared, launch)
                else:
                    touched = [
                        replace(touch, must=False) for touch in through if _reaches(launch, touch, found)
                    ]
                steps.append(Step(touched, launch=launch.number))
            if hidden or not everything:
                if not everything:
                    # Whatever else the op does may happen at any time while it runs.
                    steps.append(Step([replace(touch, must=False) for touch in through], frozenset()))
                ends.append((len(steps), frozenset(launch.number for launch in found)))
                steps.append(Step([touch for touch in through if touch.must]))
            elif op is not None and op.target.startswith("triton."):
                declared.check_filled(steps[first:])
        return [self._ordered(step, places, ends, launches) for step in steps]

    def _ordered(
        self,
        step: Step,
        places: Mapping[int, int],
        ends: Sequence[tuple[int, frozenset[int]]],
        launches: Sequence[Launch],
    ) -> Step:
        """The step with its place among the others, where the launches' order is known."""
        if step.launch is None:
            return step
        launch = next(launch for launch in launches if launch.number == step.launch)
        if launch.before is None:
            return step
        after = {places[number] for number in launch.before if number in places}
        after.update(place for place, members in ends if members <= launch.before)
        return replace(step, after=frozenset(after))

    def _by_op(
        self, program: Program, kernel: Kernel, launches: Sequence[Launch]
    ) -> Iterator[tuple[Op | None, list[Launch]]]:
        """Launches by the op that makes them, in the ops' order; all as one where they stand for the kernel."""
        by_op: dict[int | None, list[Launch]] = defaultdict(list)
        for launch in launches:
            by_op[launch.op].append(launch)
        if None in by_op:
            yield None, list(launches)
            return
        foreign = sorted(str(op) for op in by_op if op not in kernel.ops)
        if foreign:
            raise ArtifactError(
                f"{self.bundle.path}: target {self.target} has launches of ops {foreign} in kernel"
                f" {kernel.id} of {program.name}, which holds no such op; trace again"
            )
        for op in kernel.ops:
            yield program.ops[op], by_op[op]

    def _is_whole(self, op: Op | None) -> bool:
        """Whether an op's recorded launches are all that it does: a custom op that was not captured on a GPU may
        call operators too, of which nothing is recorded."""
        return self.launches.complete or op is None or op.target.startswith("triton.")

    def _through(
        self, touches: Sequence[Touch], found: Sequence[Launch], hidden: Sequence[Launch], everything: bool
    ) -> list[Touch]:
        """Declared accesses that may be made by what is not known of an op."""
        if not everything:
            return list(touches)
        reached = {buffer for launch in found for buffer in launch.buffers}
        by_hidden = {buffer for launch in hidden for buffer in launch.buffers}
        return [touch for touch in touches if touch.buffer in by_hidden or touch.buffer not in reached]

    def _known(self, declared: Declaration, launch: Launch) -> list[Touch]:
        """Touches of a launch that has PTX or is a copy."""
        if launch.kind == "kernel":
            return self._analysed(declared, launch)
        sizes = {buffer: self._bytes(buffer) for buffer in launch.buffers}
        return list(copy_touches(launch, sizes))

    def _analysed(self, declared: Declaration, launch: Launch) -> list[Touch]:
        name = launch.module
        assert name is not None
        if name not in self.modules:
            self.modules[name] = _parsed(self.launches.texts[name], f"{self.target} module {name[:19]}")
        module = self.modules[name]
        program, kernel = declared.program, declared.kernel
        buffers = list(dict.fromkeys([*launch.buffers, *(touch.buffer for touch in declared.touches)]))
        analysis = self._analyse(module, name, launch, buffers)
        for variable, line in analysis.written_variables:
            raise ModelError(
                f"{program.name}: kernel {kernel.id} ({kernel.name}): the PTX for {self.target} writes the module"
                f" variable {variable} (line {line} of {launch.function}), through which kernels could depend on"
                " each other unseen; pass it as a tensor argument and trace again"
            )
        self.unknown.update(analysis.unknown_opcodes)
        place = (program.id, kernel.id)
        for reason in analysis.fallbacks:
            self.reasons[f"{launch.function}: {reason}, module {name[:19]}"].add(place)
        self.blocks.append(self._blocks(launch, analysis, buffers, place))
        touches: list[Touch] = []
        for local in analysis.accesses:
            buffer = buffers[local.buffer]
            if local.precision == "bounded":  # the reasons of fallbacks are the launch's own
                self.reasons[f"{launch.function}: {_why(name, local)}"].add(place)
            if local.precision != "fallback" and buffer < len(self.trace.buffers):
                declared.check_access(launch, module, local, buffer)
            touches.append(
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
        return [*touches, *self._resolved(module, name, launch, buffers, analysis)]

    def _resolved(
        self, module: Module, name: str, launch: Launch, buffers: Sequence[int], analysis: LaunchAnalysis
    ) -> list[Touch]:
        """What the accesses that depend on data are for the stored content."""
        loose = {(a.buffer, a.mode) for a in analysis.accesses if a.precision == "bounded"}
        written = {a.buffer for a in analysis.accesses if a.mode == "write"}
        stored = {
            index: self.content[buffer]
            for index, buffer in enumerate(buffers)
            if buffer in self.content and index not in written
        }
        if not loose or not stored:
            return []
        found = self._analyse(module, name, launch, buffers, stored)
        still = {(a.buffer, a.mode) for a in found.accesses if a.precision != "exact"}
        return [
            Touch(
                buffer=buffers[access.buffer],
                mode=access.mode,
                must=False,
                boxes=access.boxes,
                evidence="ptx",
                precision="exact",
                valid_for="content",
                detail="looked up in stored content",
            )
            for access in found.accesses
            if (access.buffer, access.mode) in loose - still
        ]

    def _analyse(
        self,
        module: Module,
        name: str,
        launch: Launch,
        buffers: Sequence[int],
        content: Mapping[int, bytes] | None = None,
    ) -> LaunchAnalysis:
        """The analysis with buffers numbered by their place in ``buffers``, so that repeated layers share it."""
        number = {buffer: index for index, buffer in enumerate(buffers)}
        shape = LaunchShape(
            entry=launch.function,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            parameters=launch.parameters,
            relocations=tuple(
                Relocation(r.offset, number[r.buffer], r.byte_offset) for r in launch.relocations
            ),
        )
        sizes = tuple(self._bytes(buffer) for buffer in buffers)
        if content:
            return analyse_launch(module, shape, dict(enumerate(sizes)), content)
        key = (name, shape, sizes)
        if key not in self.results:
            self.results[key] = analyse_launch(module, shape, dict(enumerate(sizes)))
        return self.results[key]

    def _blocks(
        self, launch: Launch, analysis: LaunchAnalysis, buffers: Sequence[int], place: tuple[int, int]
    ) -> LaunchBlocks:
        split = analysis.split
        if launch.cluster != (1, 1, 1) and split.independent:
            split = replace(split, reason="the blocks of a cluster share memory")
        footprints = (replace(found, buffer=buffers[found.buffer]) for found in analysis.block_footprints)
        return LaunchBlocks(
            program=place[0],
            kernel=place[1],
            launch=launch.number,
            footprints=tuple(f for f in footprints if f.buffer < len(self.trace.buffers)),
            split=split,
        )

    def _bytes(self, buffer: int) -> int:
        if buffer < len(self.trace.buffers):
            return self.trace.buffers[buffer].bytes
        return self.launches.scratch_bytes[buffer]

    def _carry(self, access: Access) -> None:
        """Remember which kernels may find in a library's scratch what others left there."""
        if access.needs_content:
            self.carriers[access.program, access.buffer].add(access.kernel)
        if access.mode == "write":
            self.spoilers[access.program, access.buffer].add(access.kernel)

    def _chains(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for (program, buffer), readers in self.carriers.items():
            members = sorted(readers | self.spoilers[program, buffer])
            groups[program].append(tuple(members))
            reason = "scratch that outlives kernels is read before it is written: its users share a device"
            self.reasons[reason].update((program, kernel) for kernel in readers)
        return {program: union_of_chains(found) for program, found in groups.items()}


@lru_cache(maxsize=512)
def _parsed(text: str, where: str) -> Module:
    """The module of a text; the same object again, so that its launches' analyses are remembered too."""
    return parse_module(text, where)


def _reaches(launch: Launch, touch: Touch, found: Sequence[Launch]) -> bool:
    """Whether an unknown launch may make a declared access: it has a pointer to the buffer, or nobody has one."""
    return touch.buffer in launch.buffers or not any(touch.buffer in other.buffers for other in found)


def _why(module: str, access: PtxAccess) -> str:
    return f"{access.reason} (module {module[:19]}, line {access.line})"
