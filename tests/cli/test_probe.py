"""`tessera probe` as a user calls it, on whatever machine this is."""

import json
from pathlib import Path

import pytest
import tomli

from tests.cli.test_errors import one_line


def test_devices_are_listed_without_measuring(tessera, tmp_path: Path) -> None:
    done = tessera("probe", "--cpus", 1, "--no-measure", "--json", "-o", "c.toml")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    content = tomli.loads((tmp_path / "c.toml").read_text())
    assert [row["name"] for row in facts["devices"]] == [row["name"] for row in content["device"]]
    assert content["device"][-1]["type"] == "cpu-1thread"
    assert tessera("inspect", "c.toml", "--check").returncode == 0


def test_the_file_can_go_to_standard_output(tessera) -> None:
    done = tessera("probe", "--cpus", 1, "--no-measure", "-o", "-")
    assert tomli.loads(done.stdout)["kind"] == "cluster"
    assert "devices" in done.stderr


@pytest.mark.parametrize("words", [("--slices", "96x36"), ("--cpus", "4097")])
def test_what_is_not_here_is_one_line(tessera, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert words[0] in one_line(tessera("probe", *words, "-o", "c.toml"))
    assert not (tmp_path / "c.toml").exists()


def test_a_file_of_another_kind_stays(tessera, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("mine = 1\n")
    line = one_line(tessera("probe", "--no-measure", "--cpus", 1, "-o", "c.toml"))
    assert "left alone" in line and (tmp_path / "c.toml").read_text() == "mine = 1\n"


@pytest.mark.serial
def test_a_probed_machine_can_be_planned_for(tessera, made: Path, tmp_path: Path) -> None:
    """From the probe to a plan, on the links that were measured here."""
    from tessera_core.devices.cpu import usable_cpus

    if len(usable_cpus()) < 2:
        pytest.skip("needs two CPUs: this process may use one")
    assert tessera("probe", "--cpus", 2, "--seconds", 0.2, "-o", "probed.toml").returncode == 0
    done = tessera(
        "partition", made / "x.trace", made / "x.deps", made / "x.profile.arrow", "--cluster", "probed.toml",
        "--policy", "throughput", "-o", "x.plan.toml", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    devices = {row["name"] for row in tomli.loads((tmp_path / "x.plan.toml").read_text())["device"]}
    assert devices <= {row["name"] for row in tomli.loads((tmp_path / "probed.toml").read_text())["device"]}
