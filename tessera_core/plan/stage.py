"""The partition stage: artifacts in, a checked plan out, and a report of what was weighed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tessera_core.deps.graph import Deps, load_deps
from tessera_core.plan.cluster import Cluster, load_cluster
from tessera_core.plan.evaluate import defects, input_defects
from tessera_core.plan.ir import Plan, save_plan
from tessera_core.plan.predict import Origin
from tessera_core.plan.setting import Setting
from tessera_core.plan.strategies.compare import compare
from tessera_core.profile.catalogue import Catalogue, catalogue
from tessera_core.profile.merge import conflict_table, load_profiles
from tessera_core.profile.times import Times
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.errors import InputError
from tessera_formats.trace import check_same_program

INTERVAL_COLUMNS = ("route", "program", "resource_us", "latency_us", "interval_us", "simulated_us")
CYCLE_COLUMNS = ("route", "resource_us", "latency_us", "interval_us", "simulated_us", "token_us")
MEMORY_COLUMNS = ("device", "weight_bytes", "state_bytes", "activation_bytes", "capacity_bytes")


def _silent(message: str) -> None:
    """Progress that nobody asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStage:
    """Place a trace's programs on a cluster.

    ``policy``: throughput or latency. ``strategy``: one of :data:`tessera_formats.plan.STRATEGIES`.
    ``in_flight``: batches in flight over all routes; None: each strategy chooses. ``output_tokens``: tokens
    that a request generates, which weighs decode against prefill; None:
    :func:`tessera_core.plan.setting.usual_tokens`. ``catalogues``: files of users' device types.
    """

    policy: str = "throughput"
    strategy: str = "auto"
    in_flight: int | None = None
    output_tokens: int | None = None
    catalogues: tuple[Path, ...] = ()

    def run(
        self,
        trace: Path,
        deps: Path,
        profiles: Sequence[Path | str],
        cluster: Path,
        output: Path | str,
        progress: Callable[[str], None] = _silent,
    ) -> Facts:
        """Read, plan, check, write (``-``: standard output); profiles may hold one ``-``.

        Raises :class:`InputError`, :class:`InfeasibleError` (which constraint, by how much, what helps),
        :class:`OriginError` for artifacts of different programs, and the readers' errors.
        """
        if self.in_flight is not None and self.in_flight < 1:
            raise InputError(f"--in-flight {self.in_flight}: at least one batch must be in flight")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise InputError(f"--output-tokens {self.output_tokens}: at least one token must be generated")
        progress("reading artifacts")
        times = load_profiles(profiles)
        program, graph = load_trace(trace), load_deps(deps)
        check_same_program(
            {
                str(trace): program.digest,
                str(deps): graph.program_digest,
                "the profile": times.program_digest,
            }
        )
        known = catalogue(self.catalogues)
        place = load_cluster(cluster, lambda *pair: times.links.get(pair), memory_of(times, known))
        progress("weighing strategies")
        plan = make_plan(self, program, graph, times, place)
        save_plan(output, plan)
        facts = plan_facts(plan)
        return replace(facts, tables=(*facts.tables, *conflict_table(times.conflicts)))


def make_plan(stage: PartitionStage, trace: Trace, deps: Deps, times: Times, cluster: Cluster) -> Plan:
    """The plan, re-checked by the independent evaluator; errors as in :meth:`PartitionStage.run`."""
    for device in cluster.devices:
        times.overhead_us(device.type)  # names the type and what to run where the profile lacks it
    origin = Origin(
        trace=trace,
        deps=deps,
        times=times,
        cluster=cluster,
        policy=stage.policy,
        digests={
            "program_digest": trace.digest,
            "deps_digest": deps.digest,
            "profile_digest": times.digest,
            "cluster_digest": cluster.digest,
        },
        targets=deps.targets,
    )
    setting = Setting(origin=origin, in_flight=stage.in_flight, output_tokens=stage.output_tokens)
    plan, candidates = compare(setting, stage.strategy)
    condition = next(c.condition for c in candidates if c.strategy == plan.facts["strategy"])
    wrong = defects(plan, trace, deps) + input_defects(
        plan,
        trace,
        lambda signature, kind: times.time(signature, kind, condition).median_us,
        cluster.links,
        {device.type: times.overhead_us(device.type) for device in cluster.devices},
        {device.name: device.capacity_bytes for device in cluster.devices},
    )
    assert not wrong, f"the plan fails its own check: {wrong[:3]}"
    return plan


def plan_facts(plan: Plan) -> Facts:
    """What a reader wants to know of a plan: figures, the comparison, routes, memory and what crosses."""
    prediction = plan.facts["prediction"]
    compared = plan.facts["compared"]
    columns = tuple(name for name in compared[0] if name != "chosen") if compared else ("strategy",)
    crossing: dict[tuple[int, str, str, str], list[int]] = {}
    for row in plan.transfers:
        crossing.setdefault((row.route, row.program, row.source, row.destination), []).append(row.bytes)
    kernels: dict[tuple[int, str, str], list[float]] = {}
    for item in plan.assignments:
        kernels.setdefault((item.route, item.program, item.device), []).append(item.time_us)
    shares = {name: prediction[name] for name in ("measured_share", "silicon_share", "modelled_share")}
    return Facts(
        title="plan",
        values={
            "strategy": plan.facts["strategy"],
            "requested": plan.facts["requested"],
            "policy": plan.facts["policy"],
            "tokens_per_s": prediction["tokens_per_s"],
            "time_per_token_us": prediction["time_per_token_us"],
            "objective_us": prediction["objective_us"],
            "lower_bound_us": prediction["lower_bound_us"],
            "gap": prediction["gap"],
            "probability_best": prediction["probability_best"],
            **shares,
        },
        tables=(
            FactTable("strategies", columns, tuple(tuple(row[c] for c in columns) for row in compared)),
            FactTable(
                "routes",
                ("route", "share", "batch", "slots", "programs"),
                tuple((r.route, r.share, r.batch, r.slots, ", ".join(r.programs)) for r in plan.routes),
            ),
            FactTable(
                "intervals",
                INTERVAL_COLUMNS,
                tuple(tuple(row[c] for c in INTERVAL_COLUMNS) for row in prediction["intervals"]),
            ),
            FactTable(
                "cycles",
                CYCLE_COLUMNS,
                tuple(tuple(row[c] for c in CYCLE_COLUMNS) for row in prediction["cycles"]),
            ),
            FactTable(
                "kernels",
                ("route", "program", "device", "kernels", "time_us"),
                tuple((*key, len(times), sum(times)) for key, times in kernels.items()),
            ),
            FactTable(
                "transfers",
                ("route", "program", "source", "destination", "transfers", "bytes"),
                tuple((*key, len(sizes), sum(sizes)) for key, sizes in crossing.items()),
            ),
            FactTable(
                "memory",
                MEMORY_COLUMNS,
                tuple(tuple(row[c] for c in MEMORY_COLUMNS) for row in plan.facts["memory"]),
            ),
        ),
    )


def memory_of(times: Times, known: Catalogue) -> Callable[[str], int | None]:
    """Memory by device type: the catalogue's; None where only a profile knows the type."""

    def memory_bytes(kind: str) -> int | None:
        try:
            return known.type(kind).memory_bytes
        except InputError:
            if kind in times.devices:
                return None
            raise

    return memory_bytes
