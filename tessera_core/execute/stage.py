"""The run stage: a plan executed on workers, or simulated, with the same artifact either way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tessera_core.adapt.arrivals import arrivals
from tessera_core.deps.graph import load_deps
from tessera_core.devices.cpu import CpuDevice, cpu_device, processor_name, usable_cpus
from tessera_core.execute.batches import (
    RequestBatch,
    beyond_trace,
    check_requests,
    fixed_batches,
    workload_batches,
)
from tessera_core.execute.counting import Counted, ranges
from tessera_core.execute.pipeline import Options, Outcome, Pipeline
from tessera_core.execute.results import RunResult
from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.execute.simulator import completions, simulate
from tessera_core.plan.evaluate import structure_defects
from tessera_core.plan.ir import Plan, load_plan
from tessera_core.program.guards import check_replayable
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_core.report.facts import Facts
from tessera_core.trace.operators import op_kind
from tessera_core.trace.parallel.shares import shard_of
from tessera_formats.errors import ArtifactError, DeviceLostError, InputError, OriginError, VerificationError
from tessera_formats.trace import check_same_program
from tessera_formats.workload import read_workload

WORKER_TYPES = ("cpu-1thread",)
"""Device types that a CPU worker is, so that they bind by themselves."""

MOST_SLOTS = 4096
"""Over all routes: each has memory, regions and a place in the messages of every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """Options of a run. ``bind``: plan device -> hardware (``cpu:K``), for those that don't bind by themselves.

    ``batches`` and ``output_tokens`` None: a few batches per slot, and what the plan assumed.
    """

    bind: Mapping[str, str] = field(default_factory=dict)
    batches: int | None = None
    workload: Path | None = None
    output_tokens: int | None = None
    backend: Literal["auto", "simulate"] = "auto"
    verify: bool = False
    trust: bool = False
    weights: Path | None = None

    def run(
        self,
        plan: Path | str,
        trace: Path,
        deps: Path,
        output: Path,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Facts:
        """Run ``plan`` and write the run artifact to ``output``.

        Raises OriginError for artifacts of different programs, InputError for hardware that is not there,
        GuardError for requests outside the trace (a simulation notes them); nothing is written then. Raises
        DeviceLostError for a lost worker, the error of one that could not go on, and VerificationError for
        different outputs, after the artifact has been written.
        """
        placed, record = load_plan(plan), load_trace(trace)
        self._check_artifacts(placed, plan, record, trace, deps)
        models = plan_routes(placed, record)
        _check_slots(placed, record, models)
        batches, seed = self._batches(models)
        note = None
        if self.backend == "simulate":
            note = beyond_trace(record, models, batches)
            if self.verify:
                raise InputError("run: a simulation makes no outputs; drop --verify or --backend simulate")
            outcome, machine = _simulated(models, batches, progress), ""
        else:
            check_replayable(record, trace, "use --backend simulate")
            check_requests(record, models, batches, seed)
            _check_whole(record, trace)
            cpus = self._bindings(placed, models)
            options = Options(
                cpus={device: cpu.number for device, cpu in cpus.items()},
                seed=seed,
                weights_file=self.weights,
                trusted=self.trust,
            )
            with Pipeline(record, models, options, progress) as pipeline:
                progress(f"running {len(batches)} batches on {len(cpus)} workers")
                outcome = pipeline.run(batches)
            machine = f"{processor_name()}, {len(cpus)} workers of one thread"
        different = self._verify(record, models, batches, outcome, seed, progress) if self.verify else None
        result = RunResult(
            plan=placed,
            models=models,
            batches=tuple(batches),
            outcome=outcome,
            backend="simulate" if self.backend == "simulate" else "cpu",
            verified="not checked" if different is None else "different" if different else "equal",
            machine=machine,
        )
        progress(f"writing {output}")
        facts = result.write(output)
        if note is not None:
            facts = replace(facts, values={**facts.values, "note": note})
        if outcome.lost:
            message = _loss(outcome, batches, output)
            raise DeviceLostError(message) if outcome.error is None else type(outcome.error)(message)
        if different:
            raise VerificationError(
                f"run: {len(different)} of {len(batches)} batches differ from the unpartitioned program "
                f"({different[0]}); see {output}, and report it with the plan and the trace"
            )
        return facts

    def _check_artifacts(
        self, plan: Plan, plan_path: Path | str, trace: Trace, trace_path: Path, deps_path: Path
    ) -> None:
        deps = load_deps(deps_path)
        check_same_program(
            {
                f"plan {plan_path}": plan.program_digest,
                f"trace {trace_path}": trace.digest,
                f"deps {deps_path}": deps.program_digest,
            }
        )
        if plan.facts["deps_digest"] != deps.digest:
            raise OriginError(
                f"{plan_path}: was made with other dependencies than {deps_path}; run tessera partition again"
            )
        wrong = structure_defects(plan, trace, deps)
        if wrong:
            raise ArtifactError(f"{plan_path}: {wrong[0]}; run tessera partition again")

    def _batches(self, models: Sequence[RouteModel]) -> tuple[list[RequestBatch], int]:
        """The batches and the seed of their prompts."""
        if self.workload is None:
            return fixed_batches(models, self.batches, self.output_tokens), 0
        if self.batches is not None:
            raise InputError("run: a workload states its own requests; drop --batches or --workload")
        content = read_workload(self.workload)
        requests = arrivals(content, str(self.workload))
        return workload_batches(models, requests, self.output_tokens), int(content.get("seed", 0))

    def _bindings(self, plan: Plan, models: Sequence[RouteModel]) -> dict[str, CpuDevice]:
        """The hardware of every device that a route uses."""
        used = [device for device in plan.devices if any(device.name in model.devices for model in models)]
        names = [device.name for device in used]
        for name in self.bind:
            if name not in names:
                raise InputError(f"--bind {name}: the plan uses no such device; it uses {', '.join(names)}")
        bound = {name: cpu_device(hardware) for name, hardware in self.bind.items()}
        free = iter(
            cpu_device(f"cpu:{index}")
            for index in range(len(usable_cpus()))
            if all(cpu.index != index for cpu in bound.values())
        )
        for device in used:
            if device.name in bound:
                continue
            if device.type not in WORKER_TYPES:
                raise InputError(
                    f"run: device {device.name} is of type {device.type}, which is not here; "
                    "use --backend simulate"
                )
            cpu = next(free, None)
            if cpu is None:
                raise InputError(
                    f"run: the plan wants {len(used)} CPU workers, this process may use {len(usable_cpus())} "
                    "CPUs; use --backend simulate, or partition for fewer"
                )
            bound[device.name] = cpu
        shared = [name for name in names if sum(bound[name] == other for other in bound.values()) > 1]
        if shared:
            raise InputError(f"run: {' and '.join(shared)} are bound to one CPU; bind each to its own")
        return {name: bound[name] for name in names}

    def _verify(
        self,
        trace: Trace,
        models: Sequence[RouteModel],
        batches: Sequence[RequestBatch],
        outcome: Outcome,
        seed: int,
        progress: Callable[[str], None],
    ) -> list[str]:
        # Here and not above: it needs PyTorch, which a simulation does without.
        from tessera_core.execute.reference import differences

        progress("comparing with the unpartitioned program")
        return differences(
            trace,
            models,
            batches,
            outcome,
            seed=seed,
            weights_file=self.weights,
            trusted=self.trust,
        )


def _check_whole(trace: Trace, path: Path) -> None:
    """Refuse a rank's shard: the workers of a run are one rank's, and its collectives need the others."""
    shard = shard_of(trace.info)
    joins = any(op_kind(op.target) == "collective" for program in trace.programs for op in program.ops)
    if shard is not None or joins:  # what it does counts, whatever its manifest leaves out
        said = "one rank's shard" if shard is None else f"rank {shard.rank} of {shard.ranks}"
        raise InputError(
            f"{path}: is {said}, and its collectives need the other ranks;"
            " use --backend simulate, or trace without --tensor-parallel"
        )


def _simulated(
    models: Sequence[RouteModel], batches: Sequence[RequestBatch], progress: Callable[[str], None]
) -> Outcome:
    counted = Counted(len(batches), progress)
    spans = simulate(models, [item.plan for item in batches], counted.one_more)
    finished: dict[int, float] = {}
    for item in completions(spans):
        finished[item.batch] = item.end_us
    return Outcome(spans=spans, finished=finished, lanes={span.batch: span.slot for span in spans})


def _loss(outcome: Outcome, batches: Sequence[RequestBatch], output: Path) -> str:
    kept = f": {ranges(outcome.finished)}" if outcome.finished else ""
    return (
        f"run: lost {outcome.lost}; {len(outcome.finished)} of {len(batches)} batches finished{kept}; "
        f"they are kept in {output}; run it again"
    )


def _check_slots(plan: Plan, trace: Trace, models: Sequence[RouteModel]) -> None:
    """Refuse more slots than a run serves, or than state fits a device for, before anything is made for them."""
    slots = sum(model.slots for model in models)
    if slots > MOST_SLOTS:
        raise InputError(
            f"plan: has {slots:,} slots, at most {MOST_SLOTS:,} can be run; lower slots, or run tessera partition"
            " again (--in-flight)"
        )
    for device in plan.devices:
        needed = sum(
            model.slots
            * _state_bytes(
                trace,
                model,
                {h.state for h in plan.homes if h.device == device.name and h.route == model.route},
            )
            for model in models
        )
        if needed > device.capacity_bytes:
            raise InputError(
                f"plan: the state of {slots:,} slots takes {needed:,} bytes of {device.name}, which has"
                f" {device.capacity_bytes:,}; lower slots, or run tessera partition again (--in-flight)"
            )


def _state_bytes(trace: Trace, model: RouteModel, states: Collection[str]) -> int:
    """What a slot's state takes in its last program, where it is largest."""
    bindings = trace.program(model.programs[-1].name).bindings("state")
    buffers = {trace.tensors[bindings[name].tensor].buffer for name in states if name in bindings}
    return sum(trace.buffers[buffer].bytes for buffer in buffers)
