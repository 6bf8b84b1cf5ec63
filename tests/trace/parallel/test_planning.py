"""A shard goes through the later stages: tied kernels stay together, collectives are priced, and run refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tessera_core.deps.graph import load_deps
from tessera_core.deps.stage import DepsStage
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.execute.stage import RunStage
from tessera_core.plan.evaluate import defects, structure_defects
from tessera_core.plan.ir import load_plan
from tessera_core.plan.stage import PartitionStage
from tessera_core.profile.merge import load_profiles
from tessera_core.profile.model.collective import Collective, collective_time, collectives
from tessera_core.profile.stage import ProfileStage
from tessera_core.program.store import load_trace, trace_tables
from tessera_formats.errors import InputError
from tessera_formats.trace import write_trace
from tests.trace.parallel.conftest import Shared

CLUSTER = """
[[device]]
name = "a100"
type = "a100-80gb"
memory_gb = 0.010
[[device]]
name = "l40s"
type = "l40s"
memory_gb = 0.010
[[link]]
between = ["a100", "l40s"]
gbit_per_s = 200
latency_us = 5
"""


@pytest.fixture(scope="module")
def planned(shared_models: Mapping[str, Shared], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stages' artifacts of a rank of llama-tiny, whose weights fit on no device alone."""
    folder = tmp_path_factory.mktemp("planned")
    trace = shared_models["llama-tiny"].paths[0]
    (folder / "c.toml").write_text(CLUSTER)
    DepsStage(("ops",)).run(trace, folder / "x.deps")
    ProfileStage(devices=("a100-80gb", "l40s")).run(trace, folder / "x.profile.arrow")
    PartitionStage(strategy="placement", in_flight=2).run(
        trace, folder / "x.deps", [folder / "x.profile.arrow"], folder / "c.toml", folder / "x.plan.toml"
    )
    return folder


def test_a_plan_splits_no_group(planned: Path, shared_models: Mapping[str, Shared]) -> None:
    trace, deps, plan = (
        shared_models["llama-tiny"].ranks[0],
        load_deps(planned / "x.deps"),
        load_plan(planned / "x.plan.toml"),
    )
    where: dict[tuple[str, int], set[str]] = {}
    for row in plan.assignments:
        where.setdefault((row.program, row.kernel), set()).add(row.device)
    assert {device for found in where.values() for device in found} == {"a100", "l40s"}
    for program in trace.programs:
        if all((program.name, kernel.id) in where for kernel in program.kernels):
            for group in program.ties():
                assert len({frozenset(where[program.name, kernel]) for kernel in group}) == 1
    assert defects(plan, trace, deps) == []


def test_the_checker_finds_a_group_that_was_split(planned: Path, shared_models: Mapping[str, Shared]) -> None:
    trace, deps = shared_models["llama-tiny"].ranks[0], load_deps(planned / "x.deps")
    plan = load_plan(planned / "x.plan.toml")
    name = plan.assignments[0].program
    group = trace.program(name).ties()[1]
    moved = next(a for a in plan.assignments if a.program == name and a.kernel == group[0])
    other = {"a100": "l40s", "l40s": "a100"}[moved.device]
    rows = tuple(replace(a, device=other) if a == moved else a for a in plan.assignments)
    found = structure_defects(replace(plan, assignments=rows), trace, deps)
    assert any("are tied by a collective, so they must share a device" in line for line in found)


def test_collectives_are_modelled_from_their_payload(
    planned: Path, shared_models: Mapping[str, Shared]
) -> None:
    trace = shared_models["llama-tiny"].ranks[0]
    works = collectives(trace)
    assert {(work.name, work.ranks, work.steps) for work in works.values()} == {
        ("all-reduce", 2, 2),
        ("all-gather", 2, 1),
    }
    times = load_profiles([planned / "x.profile.arrow"])
    for signature, work in works.items():
        over = {kind: times.time(signature, kind, "alone") for kind in ("a100-80gb", "l40s")}
        assert all(row.source == "modelled" and work.name in row.detail for row in over.values())
        assert over["a100-80gb"].median_us < over["l40s"].median_us


def test_a_rings_time_grows_with_payload_and_ranks() -> None:
    def time_us(name: str, ranks: int, sent: int, kind: str = "h200-sxm") -> float:
        work = Collective(name=name, ranks=ranks, steps=2 * (ranks - 1), sent_bytes=sent)
        return collective_time(work, ModelledDevice.of(kind)).median_us

    assert time_us("all-reduce", 2, 10**6) < time_us("all-reduce", 2, 10**8)
    assert time_us("all-reduce", 2, 10**6) < time_us("all-reduce", 8, 10**6)
    # 1.9 TB/s would be the memory's rate; NVLink gives 450 GB/s each way, of which NCCL reaches a share.
    assert 1e9 / 450e9 * 1e6 < time_us("all-reduce", 2, 10**9) < 2e9 / 450e9 * 1e6
    assert time_us("all-reduce", 2, 10**6, "cpu-1thread") > time_us("all-reduce", 2, 10**6)


def test_a_lone_shard_is_simulated_and_not_run(planned: Path, shared_models: Mapping[str, Shared]) -> None:
    trace = shared_models["llama-tiny"].paths[0]
    inputs = (planned / "x.plan.toml", trace, planned / "x.deps", planned / "x.run")
    with pytest.raises(InputError, match=r"is rank 0 of 2.*--backend simulate") as caught:
        RunStage().run(*inputs)
    assert "\n" not in str(caught.value)
    assert not (planned / "x.run").exists()
    RunStage(backend="simulate").run(*inputs)
    assert (planned / "x.run").is_dir()


def test_a_shard_whose_manifest_says_nothing_is_not_run_either(
    planned: Path, shared_models: Mapping[str, Shared]
) -> None:
    """The digest covers what it does, not what its manifest says."""
    trace = load_trace(shared_models["llama-tiny"].paths[0])
    info = {name: value for name, value in trace.info.items() if name not in ("tensor_parallel", "rank")}
    write_trace(planned / "y.trace", info, trace_tables(trace), trace.constants)
    with pytest.raises(InputError, match=r"is one rank's shard.*--backend simulate"):
        RunStage().run(planned / "x.plan.toml", planned / "y.trace", planned / "x.deps", planned / "y.run")
