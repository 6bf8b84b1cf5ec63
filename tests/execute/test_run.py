"""The run stage on real workers: outputs, losses, leftovers; and its simulation."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera_core.execute import pipeline
from tessera_core.execute.pipeline import Options, Pipeline
from tessera_core.execute.segments import plan_routes
from tessera_core.execute.stage import RunStage
from tessera_core.plan.ir import Plan
from tessera_core.program.ir import Guard
from tessera_formats.errors import (
    ArtifactError,
    DeviceLostError,
    GuardError,
    InputError,
    OriginError,
    VerificationError,
)
from tessera_formats.run import read_run
from tests.execute.artifacts import write_artifacts
from tests.execute.helpers import layered_trace, make_plan, place

TRACE = layered_trace(prefill_batch=1, batch=2)
PREFILL, DECODE = (program.name for program in TRACE.programs)
ZIGZAG = {"0-4": "a", "5-6": "b", "7-8": "a", "9-11": "b"}
CHAIN = {"0-4": "a", "5-11": "b"}
TYPES = {"a": "cpu-1thread", "b": "cpu-1thread"}

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


def placement(table: dict[str, str] = ZIGZAG, slots: int = 3) -> Plan:
    return make_plan(place(TRACE, {PREFILL: table, DECODE: table}, slots=slots), types=TYPES)


def copies() -> Plan:
    return make_plan(
        place(TRACE, "a", route=0, slots=1, share=0.75),
        place(TRACE, "b", route=1, slots=2, share=0.25),
        types=TYPES,
    )


def rows(run: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_run(run).table(table).to_pylist()
    return found


def children(process: int | None = None) -> set[int]:
    number = process or os.getpid()
    found = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii")
    return {int(number) for number in found.split()}


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def channels() -> set[str]:
    """The pipes, sockets and shared memory objects that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that reads the folder is gone by now
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith(("pipe:", "socket:", "/memfd:tessera"))}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No worker, shared memory, pipe or socket outlives a run, however it ends."""
    before = (children(), channels())
    yield
    assert children() <= before[0]
    assert channels() <= before[1]


@needs_two_cores
@pytest.mark.parametrize("plan", [placement(), copies()], ids=["placement", "data-parallel"])
def test_a_run_gives_the_unpartitioned_tokens(tmp_path: Path, plan: Plan) -> None:
    from tessera_core.program.generate import generate

    paths = write_artifacts(tmp_path, TRACE, plan)
    facts = RunStage(batches=5, verify=True).run(*paths, tmp_path / "x.run")
    assert facts.values["verified"] == "equal"
    assert facts.values["status"] == "finished"
    assert (facts.values["requests"], facts.values["tokens"]) == (10, 80)
    expected = generate(TRACE, *TRACE.programs, range(10), 8)
    found: dict[int, list[int]] = {}
    for row in rows(tmp_path / "x.run", "outputs"):
        found.setdefault(row["request"], []).append(row["token"])
    assert [found[request] for request in range(10)] == expected.tolist()
    for row in rows(tmp_path / "x.run", "requests"):
        assert 0 < row["first_token_us"] < row["end_us"]


@needs_two_cores
def test_shares_of_requests_are_kept(tmp_path: Path) -> None:
    RunStage(batches=8).run(*write_artifacts(tmp_path, TRACE, copies()), tmp_path / "x.run")
    routes = [row["route"] for row in rows(tmp_path / "x.run", "requests")]
    assert (routes.count(0), routes.count(1)) == (12, 4)
    devices = {(row["route"], row["device"]) for row in rows(tmp_path / "x.run", "spans")}
    assert devices == {(0, "a"), (1, "b")}


@needs_two_cores
def test_a_workload_with_a_short_last_batch(tmp_path: Path) -> None:
    from tessera_core.program.generate import generate

    workload = tmp_path / "w.toml"
    times = "".join(
        f"[[request]]\narrival_ms = {time}\noutput_tokens = {tokens}\n"
        for time, tokens in [(0, 3), (1, 5), (2, 1), (2, 4), (30, 2)]
    )
    workload.write_text(f"seed = 9\n{times}", encoding="utf-8")
    paths = write_artifacts(tmp_path, TRACE, placement())
    RunStage(workload=workload, verify=True).run(*paths, tmp_path / "x.run")
    found = [row["token"] for row in rows(tmp_path / "x.run", "outputs") if row["request"] == 3]
    assert found == generate(TRACE, *TRACE.programs, [2, 3], 4, seed=9)[1].tolist()
    requests = rows(tmp_path / "x.run", "requests")
    assert [row["tokens"] for row in requests] == [3, 5, 1, 4, 2]
    assert all(row["first_token_us"] >= row["arrival_us"] for row in requests)
    assert requests[2]["end_us"] == requests[2]["first_token_us"]


@needs_two_cores
def test_more_workers_than_cores_make_progress() -> None:
    table = {"0-3": "a", "4-5": "b", "6": "c", "7": "a", "8": "c", "9-11": "b"}
    plan = make_plan(
        place(TRACE, {PREFILL: table, DECODE: table}, slots=3), types=dict.fromkeys("abc", "cpu-1thread")
    )
    from tessera_core.execute.batches import fixed_batches
    from tessera_core.program.generate import generate

    models = plan_routes(plan, TRACE)
    batches = fixed_batches(models, 6, 12)
    core = min(os.sched_getaffinity(0))
    options = Options(cpus=dict.fromkeys("abc", core), seed=0, weights_file=None, trusted=False)
    with Pipeline(TRACE, models, options, lambda _: None) as running:
        outcome = running.run(batches)
    expected = generate(TRACE, *TRACE.programs, range(12), 12)
    for batch in range(6):
        decoded = [outcome.tokens[batch][iteration] for iteration in range(2, 13)]
        assert [list(row) for row in zip(*decoded, strict=True)] == expected[
            2 * batch : 2 * batch + 2, 1:
        ].tolist()


REFUSING = """
import sys
from tessera_core.execute import lane, worker
from tessera_formats.errors import InputError
start = lane.LaneMemory.start
def refuse(self, batch, *rest):
    if batch == 3:
        raise InputError("batch 3 has no prompt")
    start(self, batch, *rest)
lane.LaneMemory.start = refuse
sys.exit(worker.main(sys.argv[1:]))
"""


@needs_two_cores
def test_what_a_worker_refuses_midway_is_the_runs_error_and_finished_batches_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_COMMAND", REFUSING)
    paths = write_artifacts(tmp_path, TRACE, placement(slots=1))
    with pytest.raises(InputError, match=r"batch 3 has no prompt; 3 of 6 batches finished \(0, 1, 2\)"):
        RunStage(batches=6).run(*paths, tmp_path / "x.run")
    assert read_run(tmp_path / "x.run").info["status"] == "lost"
    kept = {row["batch"] for row in rows(tmp_path / "x.run", "requests") if row["status"] == "finished"}
    assert kept == {0, 1, 2}


@needs_two_cores
def test_a_worker_that_reads_nothing_does_not_hold_the_run_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_COMMAND", "import time; time.sleep(60)")
    monkeypatch.setattr(pipeline, "READY_SECONDS", 0.3)
    monkeypatch.setattr(pipeline, "STOP_SECONDS", 0.1)
    large = replace(TRACE, constants=bytes(1 << 22))  # more than a socket holds unread
    core = min(os.sched_getaffinity(0))
    options = Options(cpus=dict.fromkeys("ab", core), seed=0, weights_file=None, trusted=False)
    models = plan_routes(placement(), large)
    with pytest.raises(DeviceLostError, match="worker of a was not ready within"):
        Pipeline(large, models, options, lambda _: None).__enter__()


@needs_two_cores
@pytest.mark.serial
def test_a_killed_worker_ends_the_run_and_finished_batches_are_kept(tmp_path: Path) -> None:
    paths = write_artifacts(tmp_path, TRACE, placement(slots=2))
    before, named = children(), shared_memory()

    def kill(line: str) -> None:
        if line.startswith("batch") and len(children() - before) == 2:
            os.kill(max(children() - before), signal.SIGKILL)

    with pytest.raises(DeviceLostError, match=r"lost b: its worker was killed by signal 9; \d of 40 .*kept"):
        RunStage(batches=40, output_tokens=50).run(*paths, tmp_path / "x.run", kill)
    assert shared_memory() <= named
    info = read_run(tmp_path / "x.run").info
    assert (info["status"], info["lost"]) == ("lost", "b: its worker was killed by signal 9")
    requests = rows(tmp_path / "x.run", "requests")
    kept = {row["request"] for row in requests if row["status"] == "finished"}
    assert 2 <= len(kept) < 80
    assert {row["request"] for row in rows(tmp_path / "x.run", "outputs")} == kept
    assert all(row["end_us"] is None for row in requests if row["request"] not in kept)


@needs_two_cores
def test_workers_do_not_outlive_a_killed_controller(tmp_path: Path) -> None:
    plan, trace, deps = write_artifacts(tmp_path, TRACE, placement())
    program = (
        "import sys; from pathlib import Path; from tessera_core.execute.stage import RunStage\n"
        "plan, trace, deps, output = map(Path, sys.argv[1:])\n"
        "RunStage(batches=10**4).run(plan, trace, deps, output, lambda line: print(line, flush=True))\n"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, (plan, trace, deps, tmp_path / "x.run"))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert controller.stdout is not None
    with controller.stdout:
        while not controller.stdout.readline().startswith(b"batch"):
            assert controller.poll() is None
        workers = children(controller.pid)
        assert len(workers) == 2
        controller.kill()
        controller.wait()
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < limit
        time.sleep(0.05)


@needs_two_cores
def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    paths = write_artifacts(tmp_path, TRACE, placement())

    def interrupt(line: str) -> None:
        if line.startswith("batch"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunStage(batches=20).run(*paths, tmp_path / "x.run", interrupt)
    assert not (tmp_path / "x.run").exists()


@needs_two_cores
def test_different_outputs_are_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera_core.execute import reference

    run = reference.Reference.run

    def shifted(self: Any, requests: list[int], schedule: tuple[int, ...]) -> Any:
        return run(self, [request + 1 for request in requests], schedule)

    monkeypatch.setattr(reference.Reference, "run", shifted)
    paths = write_artifacts(tmp_path, TRACE, placement())
    with pytest.raises(VerificationError, match="2 of 2 batches differ"):
        RunStage(batches=2, verify=True).run(*paths, tmp_path / "x.run")
    assert read_run(tmp_path / "x.run").info["verified"] == "different"


def test_a_simulated_run_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    paths = write_artifacts(tmp_path, TRACE, placement())
    runs = [tmp_path / "one.run", tmp_path / "two.run"]
    for run in runs:
        facts = RunStage(backend="simulate", batches=6).run(*paths, run)
        assert facts.values["tokens"] == 96
    first, second = ({file.name: file.read_bytes() for file in run.iterdir()} for run in runs)
    assert first == second
    interval = read_run(runs[0]).info["intervals"][1]
    assert interval["interval_us"] == pytest.approx(70, abs=5)


def test_the_perfetto_trace_has_the_spans_and_an_arrow_for_each_crossing(tmp_path: Path) -> None:
    paths = write_artifacts(tmp_path, TRACE, placement(CHAIN))
    RunStage(backend="simulate", batches=2, output_tokens=3).run(*paths, tmp_path / "x.run")
    events = json.loads(read_run(tmp_path / "x.run").file("perfetto.json"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(rows(tmp_path / "x.run", "spans"))
    starts = [event for event in events if event["ph"] == "s"]
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    # Per batch: four iterations cross forward; the last prefill's and the first decode's tokens come back
    # to a segment of their own, the first prefill's token to the same one.
    assert len(starts) == 2 * (4 + 3)
    assert all(ends[event["id"]]["ts"] >= event["ts"] for event in starts)


def refused(
    tmp_path: Path, stage: RunStage, plan: Plan, error: type[Exception], message: str, **facts: Any
) -> None:
    paths = write_artifacts(tmp_path, TRACE, plan, **facts)
    with pytest.raises(error, match=message):
        stage.run(*paths, tmp_path / "x.run")
    assert not (tmp_path / "x.run").exists()


def test_what_can_not_be_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    plan = placement()
    gpu = make_plan(place(TRACE, "g"), types={"g": "a100-80gb"})
    refused(tmp_path, RunStage(), gpu, InputError, "g is of type a100-80gb.*--backend simulate")
    refused(tmp_path, RunStage(bind={"z": "cpu:0"}), plan, InputError, "uses no such device; it uses a, b")
    refused(tmp_path, RunStage(bind={"a": "cuda:0"}), plan, InputError, "cuda:0")
    refused(tmp_path, RunStage(bind={"a": "cpu:0", "b": "cpu:0"}), plan, InputError, "bound to one CPU")
    refused(tmp_path, RunStage(backend="simulate", verify=True), plan, InputError, "no outputs")
    lacking = replace(
        plan, transfers=tuple(t for t in plan.transfers if t.buffer != plan.transfers[0].buffer)
    )
    refused(tmp_path, RunStage(), lacking, ArtifactError, "run tessera partition again")
    refused(tmp_path, RunStage(), plan, OriginError, "different programs", program_digest="sha256:1")
    refused(tmp_path, RunStage(), plan, OriginError, "other dependencies", deps_digest="sha256:1")


@needs_two_cores
def test_what_a_worker_refuses_is_the_runs_error(tmp_path: Path) -> None:
    weights = tmp_path / "none.safetensors"
    with pytest.raises(InputError, match=r"none.safetensors: cannot be read"):
        RunStage(weights=weights).run(*write_artifacts(tmp_path, TRACE, placement()), tmp_path / "x.run")


def test_requests_beyond_the_guards_are_refused(tmp_path: Path) -> None:
    guard = Guard(subject="total_tokens", index=None, comparison="le", value=64, reason="cache")
    guarded = replace(TRACE, programs=(TRACE.programs[0], replace(TRACE.programs[1], guards=(guard,))))
    paths = write_artifacts(tmp_path, guarded, placement())
    with pytest.raises(GuardError, match="total_tokens is 65"):
        RunStage(output_tokens=60).run(*paths, tmp_path / "x.run")
    RunStage(output_tokens=59, batches=1, backend="simulate").run(*paths, tmp_path / "x.run")
