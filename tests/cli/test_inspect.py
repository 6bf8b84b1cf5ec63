import json
import re
from pathlib import Path

import pytest

ARTIFACTS = ("x.trace", "x.deps", "x.profile.arrow", "x.plan.toml", "x.run", "x.adapt", "c.toml", "w.toml")
DIGEST = re.compile(r"(sha256:)?\b[0-9a-f]{64}\b|\b[0-9a-f]{16}\b")


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_what_an_artifact_shows(tessera, golden, made: Path, artifact: str) -> None:
    done = tessera("inspect", made / artifact, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    golden(DIGEST.sub("DIGEST", done.stdout.replace(str(made), "MADE")))


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_json_holds_the_same_facts(tessera, made: Path, artifact: str) -> None:
    done = tessera("inspect", made / artifact, "--json")
    facts = json.loads(done.stdout)
    assert facts["kind"] in tessera("inspect", made / artifact).stdout
    assert facts["digest"].startswith("sha256:")


@pytest.mark.parametrize("artifact", ["x.profile.arrow", "x.plan.toml", "c.toml", "w.toml"])
def test_single_files_come_through_standard_input(tessera, made: Path, artifact: str) -> None:
    piped = tessera("inspect", "-", "--check", stdin=(made / artifact).read_bytes())
    named = tessera("inspect", made / artifact, "--check")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.splitlines()[1:] == named.stdout.splitlines()[1:]
    assert piped.stdout.startswith("-: ")


def test_damage_in_standard_input_is_told_of_it(tessera, made: Path) -> None:
    content = (made / "x.profile.arrow").read_bytes()
    done = tessera("inspect", "-", stdin=content[: len(content) // 2])
    assert done.returncode == 1
    assert done.stderr.startswith("tessera: -: ")


def test_a_plan_is_evaluated_with_trace_and_deps_or_neither(tessera, made: Path) -> None:
    done = tessera("inspect", made / "x.plan.toml", "--check", "--trace", made / "x.trace")
    assert done.returncode == 1
    assert "give both --trace and --deps" in done.stderr
