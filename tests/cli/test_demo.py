import json
import stat
from pathlib import Path

import pytest

from tessera_cli import steps
from tessera_core.report.demo import closing_facts, demo_workload
from tessera_core.report.text import render
from tessera_formats.cluster import read_cluster
from tessera_formats.workload import read_workload


@pytest.mark.parametrize("words", [*steps.PLANNING, *steps.SERVING], ids=lambda words: "-".join(words[:2]))
def test_each_step_is_a_command_line_that_parses(words: list[str]) -> None:
    import typer

    from tessera_cli.main import app

    command = typer.main.get_command(app).commands[words[0]]
    assert command.make_context(words[0], list(words[1:])).params


def test_steps_are_written_down_as_they_are_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run: list[list[str]] = []

    def invoke(words: list[str]) -> int:
        run.append(words)
        print(f"ran {words[0]}")
        return 0

    seen: list[str] = []
    steps.perform(invoke, lambda plan, tokens: f"# {plan} {tokens}\n", seen.append)
    script = (tmp_path / "commands.sh").read_text().splitlines()
    assert script[0] == "#!/bin/sh"
    assert (
        [line for line in script if line.startswith("tessera ")]
        == [" ".join(["tessera", *w]) for w in run]
        == seen
    )
    assert (tmp_path / "commands.log").read_text().count("ran ") == len(run)
    assert (tmp_path / "load.toml").read_text() == "# cpu-latency.plan.toml 16\n"
    for name in steps.CLUSTERS:
        assert len(read_cluster(tmp_path / name)["device"]) == 2


def test_the_load_is_in_shares_of_what_the_plan_carries(made: Path, tmp_path: Path) -> None:
    """The hand-made plan promises 10 tokens a second."""
    path = tmp_path / "w.toml"
    path.write_text(demo_workload(made / "x.plan.toml", 5))
    phases = read_workload(path)["phase"]
    assert [phase["requests_per_s"] for phase in phases] == [0.8, 4.0, 0.6]
    assert {phase["output_tokens"] for phase in phases} == {5}


def test_the_closing_table_says_where_each_number_comes_from(made: Path) -> None:
    plan = made / "x.plan.toml"
    facts = closing_facts(made / "x.trace", made / "x.deps", plan, [plan], [made / "x.run"], made / "x.adapt")
    assert facts.values["kernels"] == 6
    assert facts.values["different_kernels"] == 3
    assert facts.values["dependencies_by_evidence"] == {"schema": 6}
    assert facts.values["outputs_equal"] is False  # the hand-made run was not checked
    (table,) = facts.tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["devices"], row["strategy"]) for row in rows] == [
        ("A100 + L40S", "single"),
        ("2 CPU workers", "single"),
    ]
    shown = max(render(facts).splitlines()[len(facts.values) :], key=len)
    assert len(shown) <= 110
    # The run has no interval of the prefill program, so nothing is called measured.
    assert {row["measured_us"] for row in rows} == {None}


@pytest.mark.slow
@pytest.mark.serial
def test_the_demonstration_runs_twice_into_one_folder(process, tmp_path: Path) -> None:
    for _ in range(2):
        done = process("demo", "-o", "out", timeout=300)
        assert done.returncode == 0, done.stderr
        assert "outputs equal: yes" in done.stdout.splitlines()[-1]
    facts = json.loads(process("demo", "-o", "out", "--json", timeout=300).stdout)
    assert facts["outputs_equal"] is True
    assert facts["plan_changes_under_load"] >= 1
    strategies = {(row["devices"], row["strategy"]): row for row in facts["strategies"]}
    assert len(strategies) == 6
    for (devices, _), row in strategies.items():
        assert (row["measured_us"] is None) == (devices == "A100 + L40S")
        assert row["modelled_share"] == (1.0 if devices == "A100 + L40S" else 0.0)
    assert any("ptx" in evidence for evidence in facts["dependencies_by_evidence"])
    mode = (tmp_path / "out" / "commands.sh").stat().st_mode
    assert mode & stat.S_IRUSR
