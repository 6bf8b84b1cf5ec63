from dataclasses import replace
from pathlib import Path

import pytest

from tessera_core.adapt.stage import AdaptStage, plan_names
from tessera_core.plan.ir import load_plan, save_plan
from tessera_formats.adapt import read_adapt
from tessera_formats.deps import read_deps
from tessera_formats.errors import ArtifactError, InputError, OriginError
from tessera_formats.plan import write_plan
from tests.cli.artifacts import DECODE, PREFILL, plan_document, write_trace_and_deps

BURST = """
seed = 3
[[phase]]
start_ms = 0
end_ms = 1500
requests_per_s = 4
output_tokens = 8
[[phase]]
start_ms = 1500
end_ms = 3000
requests_per_s = 60
output_tokens = 8
[[phase]]
start_ms = 3000
end_ms = 5000
requests_per_s = 4
output_tokens = 8
"""


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A plan of low latency on one device, and one of twice its capacity on two, with a burst between quiet times."""
    digest = write_trace_and_deps(tmp_path)
    deps = read_deps(tmp_path / "x.deps").digest
    latency = plan_document(digest, deps, times={PREFILL: 4e3, DECODE: 6e3}, slots=1, placed="cpu0")
    write_plan(tmp_path / "latency.plan.toml", latency)
    left = plan_document(digest, deps, times={PREFILL: 5e3, DECODE: 7e3}, slots=2, placed="cpu0")
    right = plan_document(digest, deps, times={PREFILL: 5e3, DECODE: 7e3}, slots=2, placed="cpu1")
    for name in ("route", "assignment", "home"):
        left[name] = [*left[name], *({**row, "route": 1} for row in right[name])]
    left["route"] = [{**row, "share": 0.5} for row in left["route"]]
    left["prediction"]["intervals"] += [{**row, "route": 1} for row in right["prediction"]["intervals"]]
    write_plan(tmp_path / "throughput.plan.toml", left)
    (tmp_path / "w.toml").write_text(BURST)
    return tmp_path


def adapt(folder: Path, output: str = "x.adapt", plans=("throughput", "latency"), **options):
    paths = [folder / f"{name}.plan.toml" for name in plans]
    return AdaptStage(**options).run(
        paths, folder / "x.trace", folder / "x.deps", folder / "w.toml", folder / output
    )


def test_it_climbs_in_the_burst_and_comes_back(inputs: Path) -> None:
    facts = adapt(inputs)
    written = read_adapt(inputs / "x.adapt")
    written.check()
    decisions = written.table("decisions").to_pylist()
    assert [(d["before"], d["after"]) for d in decisions[:1]] == [("latency", "throughput")]
    assert 1.5e6 < decisions[0]["at_us"] < 2.4e6
    assert written.table("windows").to_pylist()[-1]["plan"] == "latency"
    assert written.info["plans"] == ["latency", "throughput"]
    compared = {row["plan"]: row for row in written.info["compared"]}
    assert set(compared) == {"adaptive", "latency", "throughput"}
    assert compared["adaptive"]["mean_latency_us"] < compared["latency"]["mean_latency_us"]
    assert facts.values["requests"] == written.table("requests").num_rows


def test_equal_inputs_give_equal_bytes(inputs: Path) -> None:
    adapt(inputs, "one.adapt")
    adapt(inputs, "two.adapt")
    files = sorted(path.name for path in (inputs / "one.adapt").iterdir())
    assert files == sorted(path.name for path in (inputs / "two.adapt").iterdir())
    for name in files:
        assert (inputs / "one.adapt" / name).read_bytes() == (inputs / "two.adapt" / name).read_bytes()


def test_a_higher_threshold_reacts_later_or_not_at_all(inputs: Path) -> None:
    adapt(inputs, "low.adapt", threshold=1.5)
    adapt(inputs, "high.adapt", threshold=1000.0)
    assert read_adapt(inputs / "high.adapt").table("decisions").num_rows == 0
    assert read_adapt(inputs / "low.adapt").table("decisions").num_rows > 0


def test_the_same_plan_twice_never_changes(inputs: Path) -> None:
    adapt(inputs, plans=("throughput", "throughput"))
    written = read_adapt(inputs / "x.adapt")
    assert written.info["plans"] == ["throughput", "throughput#2"]
    assert written.table("decisions").num_rows == 0


def test_names_are_told_apart() -> None:
    assert plan_names([Path("a/p.plan.toml"), Path("b/p.plan.toml"), Path("-")]) == ("p", "p#2", "stdin")


def test_one_plan_is_too_few(inputs: Path) -> None:
    with pytest.raises(InputError, match="two or more"):
        adapt(inputs, plans=("latency",))


def test_other_programs_and_other_deps_are_refused(inputs: Path) -> None:
    plan = load_plan(inputs / "latency.plan.toml")
    save_plan(inputs / "other.plan.toml", replace(plan, facts={**plan.facts, "deps_digest": "sha256:9"}))
    with pytest.raises(OriginError, match="other deps"):
        adapt(inputs, plans=("other", "throughput"))
    save_plan(inputs / "other.plan.toml", replace(plan, facts={**plan.facts, "program_digest": "sha256:9"}))
    with pytest.raises(OriginError, match="different programs"):
        adapt(inputs, plans=("other", "throughput"))
    assert not (inputs / "x.adapt").exists()


def test_plans_for_other_devices_are_refused(inputs: Path) -> None:
    path = inputs / "latency.plan.toml"
    plan = load_plan(path)
    save_plan(path, replace(plan, devices=(*plan.devices, replace(plan.devices[0], name="cpu2"))))
    with pytest.raises(OriginError, match=r"is for other devices than .*cpu2 of type cpu-1thread") as caught:
        adapt(inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"assignments": ()}, "kernel 0 has no device"),
        ({"homes": ()}, "is not on a home of cache"),
        ({"facts": {"prediction": {"intervals": []}}}, "no intervals stated"),
    ],
)
def test_a_plan_that_is_wrong_or_says_too_little_is_refused(inputs: Path, change, words: str) -> None:
    path = inputs / "latency.plan.toml"
    plan = load_plan(path)
    prediction = {**plan.facts["prediction"], **change.get("facts", {}).get("prediction", {})}
    save_plan(path, replace(plan, **{**change, "facts": {**plan.facts, "prediction": prediction}}))
    with pytest.raises(ArtifactError, match=words) as caught:
        adapt(inputs)
    assert "latency.plan.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_link_of_no_speed_is_refused(inputs: Path) -> None:
    path = inputs / "latency.plan.toml"
    plan = load_plan(path)
    link = {
        "source": "cpu0",
        "destination": "cpu1",
        "latency_us": 1.0,
        "gbit_per_s": 0.0,
        "send_us": 0.0,
        "receive_us": 0.0,
        "occupies_sender": False,
    }
    with pytest.raises(ArtifactError, match="gbit_per_s"):
        save_plan(path, replace(plan, facts={**plan.facts, "link": [link]}))


def test_requests_that_outgrow_the_traced_cache_are_timed_with_a_note(inputs: Path) -> None:
    assert "note" not in adapt(inputs).values
    (inputs / "w.toml").write_text("[[request]]\narrival_ms = 0\noutput_tokens = 61\n")
    assert "total_tokens is 65, must be <= 64" in adapt(inputs).values["note"]
