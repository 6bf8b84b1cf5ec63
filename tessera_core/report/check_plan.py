"""A plan held against what it was made from, by the independent checker of :mod:`tessera_core.plan.evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tessera_core.deps.graph import load_deps
from tessera_core.plan.cluster import load_cluster
from tessera_core.plan.evaluate import defects, input_defects
from tessera_core.plan.ir import Plan, load_plan
from tessera_core.plan.stage import memory_of
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.merge import load_profiles
from tessera_core.profile.times import LinkRow
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_formats.errors import ArtifactError, InputError, OriginError
from tessera_formats.trace import check_same_program


def check_plan(
    path: Path,
    trace: Path,
    deps: Path,
    profiles: Sequence[Path],
    cluster: Path | None,
    catalogues: Sequence[Path] = (),
) -> str:
    """Re-derive a plan's figures and rules from its inputs; says what was checked.

    ``profiles`` and ``cluster`` go together or are both left out: with them the times, links and capacities that
    the plan used are compared too; ``catalogues`` are files of users' device types.
    Raises :class:`ArtifactError` naming the first defect and how many there are,
    :class:`OriginError` for inputs of other programs, and :class:`InputError` for half of the inputs.
    """
    if bool(profiles) != (cluster is not None):
        raise InputError(
            "profiles and cluster are checked together: give both --profile and --cluster, or neither"
        )
    plan = load_plan(path)
    described = load_trace(trace)
    analysed = load_deps(deps)
    check_same_program(
        {str(path): plan.program_digest, str(trace): described.digest, str(deps): analysed.program_digest}
    )
    if plan.facts["deps_digest"] != analysed.digest:
        raise OriginError(
            f"{path} was made from other deps than {deps}; name those, or run tessera partition again"
        )
    found = defects(plan, described, analysed)
    if cluster is not None and not found:
        found = _input_defects(plan, described, profiles, cluster, catalogues)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ArtifactError(f"{path}: {found[0]}{more}; run tessera partition again")
    inputs = "trace and deps" if cluster is None else "trace, deps, profiles and cluster"
    return f"every placement, transfer, order and figure, against {inputs}"


def _input_defects(
    plan: Plan, trace: Trace, profiles: Sequence[Path], cluster: Path, catalogues: Sequence[Path]
) -> list[str]:
    times = load_profiles(profiles)

    def link(source: str, destination: str) -> LinkRow | None:
        return times.links.get((source, destination))

    resolved = load_cluster(cluster, link, memory_of(times, catalogue(catalogues)))
    condition = plan.facts["condition"]
    return input_defects(
        plan,
        trace,
        lambda signature, kind: times.time(signature, kind, condition).median_us,
        resolved.links,
        {device.type: times.overhead_us(device.type) for device in resolved.devices},
        {device.name: device.capacity_bytes for device in resolved.devices},
    )
