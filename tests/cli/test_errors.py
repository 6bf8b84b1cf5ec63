"""Bad input gets one clear line and an exit code, and leaves everything as it was."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.artifacts import write_all
from tests.cli.conftest import SEARCH

# Each command that reads, with the artifacts that it reads; OUT is what it would write.
READERS = {
    "ptx-deps": (["ptx-deps", "x.trace", "-o", "OUT"], ["x.trace"]),
    "profile": (["profile", "x.trace", "--device", "a100-80gb", "-o", "OUT"], ["x.trace"]),
    "partition": (
        ["partition", "x.trace", "x.deps", "x.profile.arrow", "--cluster", "c.toml", "--policy",
        "latency", "-o", "OUT"],
        ["x.trace", "x.deps", "x.profile.arrow", "c.toml"],
    ),
    "run": (
        ["run", "x.plan.toml", "--trace", "x.trace", "--deps", "x.deps", "--backend", "simulate", "-o",
        "OUT"],
        ["x.plan.toml", "x.trace", "x.deps"],
    ),
    "adapt": (
        ["adapt", "x.plan.toml", "x.plan.toml", "--trace", "x.trace", "--deps", "x.deps", "--workload",
        "w.toml", "-o", "OUT"],
        ["x.plan.toml", "x.trace", "x.deps", "w.toml"],
    ),
    "inspect": (["inspect", "ARTIFACT"], ["x.trace", "x.deps", "x.run", "x.adapt", "x.profile.arrow",
    "x.plan.toml"]),
}  # fmt: skip
CASES = [(command, artifact) for command, (_, reads) in READERS.items() for artifact in reads]


def words(command: str, artifact: str) -> list[str]:
    return [artifact if word == "ARTIFACT" else word for word in READERS[command][0]]


def one_line(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The single line of an expected failure: no traceback, nothing on standard output."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tessera")
    assert "internal error" not in line
    return line


@pytest.fixture
def inputs(tmp_path: Path, made: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    "extra",
    [["--fake"], ["--seed", "3"], ["--tensor-parallel", "2"], ["--ptx-target", "sm_90"], ["--dtype", "float16"],
     ["--phase", "decode"], ["--program", "decode:batch=1,context=8"]],
    ids=lambda extra: extra[0],
)  # fmt: skip
def test_what_a_trace_would_not_take_up_is_refused(tessera, inputs: Path, extra: list[str]) -> None:
    before = (inputs / "x.trace" / "manifest.toml").read_bytes()
    done = tessera("trace", "x.trace", "--add-target", "x.trace", *extra)
    assert done.returncode == 2 and "which stays as it is: drop" in " ".join(
        done.stderr.replace("│", " ").split()
    )
    assert (inputs / "x.trace" / "manifest.toml").read_bytes() == before


def manifest_or_file(path: Path) -> Path:
    return path / "manifest.toml" if path.is_dir() else path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("command", "artifact"), CASES)
def test_missing(tessera, inputs: Path, command: str, artifact: str) -> None:
    path = inputs / artifact
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = snapshot(inputs)
    line = one_line(tessera(*words(command, artifact)))
    assert artifact in line
    assert "does not exist" in line
    assert snapshot(inputs) == before


@pytest.mark.parametrize(("command", "artifact"), CASES)
def test_truncated(tessera, inputs: Path, command: str, artifact: str) -> None:
    path = manifest_or_file(inputs / artifact)
    content = path.read_bytes()
    # Files that people write say nothing about their length, so those are cut within a value.
    path.write_bytes(content[: len(content) // 2] if len(content) > 300 else content[:-4])
    before = snapshot(inputs)
    line = one_line(tessera(*words(command, artifact)))
    assert artifact in line
    assert snapshot(inputs) == before


@pytest.mark.parametrize(
    ("command", "artifact"), [case for case in CASES if case[1] in ("x.trace", "x.profile.arrow")]
)
def test_a_flipped_bit_in_a_table(tessera, inputs: Path, command: str, artifact: str) -> None:
    path = inputs / artifact
    if path.is_dir():
        path = next(path.glob("kernels-*.arrow"))
    content = bytearray(path.read_bytes())
    at = content.index(b"signature-")
    content[at] ^= 1
    path.write_bytes(content)
    line = one_line(tessera(*words(command, artifact), *(["--check"] if command == "inspect" else [])))
    assert artifact in line
    assert "damaged" in line


@pytest.mark.parametrize(("command", "artifact"), [case for case in CASES if not case[1].endswith(".arrow")])
def test_a_newer_version(tessera, inputs: Path, command: str, artifact: str) -> None:
    path = manifest_or_file(inputs / artifact)
    text = path.read_text()
    path.write_text(
        text.replace("version = 1\n", "version = 99\n", 1)
        if "version = " in text
        else "version = 99\n" + text
    )
    line = one_line(tessera(*words(command, artifact)))
    assert "version 99" in line
    assert "upgrade tessera-toolchain" in line


@pytest.mark.parametrize(("command", "artifact"), [case for case in CASES if case[0] != "inspect"])
def test_another_kind(tessera, inputs: Path, command: str, artifact: str) -> None:
    other = "x.run" if (inputs / artifact).is_dir() else ("w.toml" if artifact != "w.toml" else "c.toml")
    given = [other if word == artifact else word for word in words(command, artifact)]
    line = one_line(tessera(*given))
    assert other in line


@pytest.mark.parametrize(
    ("command", "foreign"),
    [
        ("partition", "x.deps"),
        ("partition", "x.profile.arrow"),
        ("run", "x.plan.toml"),
        ("run", "x.deps"),
        ("adapt", "x.plan.toml"),
        ("adapt", "x.deps"),
    ],
)
def test_artifacts_of_different_programs(process, inputs: Path, command: str, foreign: str) -> None:
    (inputs / "other").mkdir()
    write_all(inputs / "other", seed=1)
    given = [f"other/{foreign}" if word == foreign else word for word in words(command, foreign)]
    line = one_line(process(*given))
    assert "different programs" in line
    assert not (inputs / "OUT").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["profile", "x.trace", "--device", "h42", "-o", "p"], "h42"),
        (["profile", "x.trace", "--device", "cpu-1thread=cpu:999", "-o", "p"], "cpu:999"),
        (["trace", "no-such-model", "--program", "decode:batch=1,context=8", "-o", "t"], "no-such-model"),
        (["trace", "llama-tiny", "--program", "decode:batch=0", "-o", "t"], "decode:batch=0"),
    ],
)
def test_unknown_names(tessera, inputs: Path, given: list[str], named: str) -> None:
    before = snapshot(inputs)
    assert named in one_line(tessera(*given))
    assert snapshot(inputs) == before


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["partition", "t", "d", "p", "--cluster", "c", "--policy", "latency", "--strategy", "magic",
        "-o", "x"], "magic"),
        (["partition", "t", "d", "p", "--cluster", "c", "--policy", "best", "-o", "x"], "best"),
        (["partition", "t", "d", "-", "-", "--cluster", "c", "--policy", "latency", "-o", "x"],
        "only one artifact"),
        (["adapt", "-", "-", "--trace", "t", "--deps", "d", "--workload", "w", "-o", "x"],
        "only one artifact"),
        (["trace", "llama-tiny", "-o", "x"], "--program"),
        (["trace", "llama-tiny", "--phase", "decode", "-o", "x"], "--context"),
        (["ptx-deps", "x.trace", "-o", "-"], "is a folder"),
        (["run", "p", "--trace", "t", "--deps", "d", "-o", "x", "--bind", "a100"], "NAME=HARDWARE"),
        (["run", "p", "--trace", "t", "--deps", "d", "-o", "x", "--bind", "a=cpu:0", "--bind",
        "a=cpu:1"], "twice"),
        (["run", "p", "--trace", "t", "--deps", "d", "-o", "x", "--batches", "0"], "--batches"),
        (["adapt", "p", "q", "--trace", "t", "--deps", "d", "--workload", "w", "-o", "x", "--threshold",
        "inf"], "--threshold"),
        (["adapt", "p", "q", "--trace", "t", "--deps", "d", "--workload", "w", "-o", "x", "--window-ms",
        "nan"], "--window-ms"),
        (["profile", "t", "--device", "l4", "-o", "x", "--seconds", "inf"], "--seconds"),
        (["inspect"], "PATH"),
        (["inspect", "x", "--frob"], "--frob"),
        (["frob"], "frob"),
    ],
)  # fmt: skip
def test_wrong_usage(tessera, given: list[str], named: str) -> None:
    line = one_line(tessera(*given), code=2)
    assert named in line
    assert "--help" in line


def test_what_is_no_artifact(tessera, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.toml").write_text("a = 1\n")
    for name in ("note.txt", "empty", "other.toml"):
        assert name in one_line(tessera("inspect", name))


def test_a_hand_edited_plan_is_a_warning(tessera, inputs: Path) -> None:
    plan = inputs / "x.plan.toml"
    plan.write_text(plan.read_text().replace('reason = "all on cpu0"', 'reason = "my own"'))
    done = tessera("inspect", "x.plan.toml")
    assert done.returncode == 0
    assert done.stderr == "tessera: warning: x.plan.toml: was edited since it was written\n"
    assert "my own" in done.stdout


def test_a_warning_about_a_file_is_given_once_however_often_it_is_read(tessera, inputs: Path) -> None:
    plan = inputs / "x.plan.toml"
    plan.write_text(plan.read_text().replace('reason = "all on cpu0"', 'reason = "my own"'))
    done = tessera("inspect", "x.plan.toml", "--check", "--trace", "x.trace", "--deps", "x.deps")
    assert done.stderr.count("was edited") == 1


def test_a_reader_that_goes_away_is_no_error(inputs: Path) -> None:
    """The read end is closed before the command writes."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "tessera_cli", "inspect", "x.trace"],
        cwd=inputs, stdout=write, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SEARCH},
        check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_our_own_mistakes_ask_for_a_report(inputs: Path, debug: str) -> None:
    code = (
        "import sys, tessera_core.report.inspect as module\n"
        "from tessera_cli.main import main\n"
        "module.detect_kind = lambda path: 1 / 0\n"
        "main(['inspect', 'x.trace'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=inputs, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": SEARCH, "TESSERA_DEBUG": debug},
    )  # fmt: skip
    assert done.returncode == 70
    assert "internal error, please report: ZeroDivisionError" in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == (debug == "1")


def test_an_interrupt_ends_with_130(inputs: Path) -> None:
    code = (
        "import tessera_core.report.inspect as module\n"
        "from tessera_cli.main import main\n"
        "def interrupted(path):\n    raise KeyboardInterrupt\n"
        "module.detect_kind = interrupted\n"
        "main(['inspect', 'x.trace'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=inputs, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": SEARCH},
    )  # fmt: skip
    assert done.returncode == 130
    assert len(done.stderr.splitlines()) == 1


def test_what_libraries_print_stays_out_of_standard_output(inputs: Path) -> None:
    """A library in C writes to file descriptor 1; a plan in a pipe must not notice."""
    code = (
        "import os, tessera_core.report.inspect as module\n"
        "from tessera_cli.main import main\n"
        "original = module.detect_kind\n"
        "module.detect_kind = lambda path: (os.write(1, b'Running HiGHS'), original(path))[1]\n"
        "main(['inspect', 'w.toml'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=inputs, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": SEARCH},
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith("w.toml: workload\n")


def test_a_plan_goes_through_a_pipe(tessera, inputs: Path) -> None:
    """With `-o -` standard output is the artifact, byte for byte, and the table goes to standard error."""
    words = ["partition", "x.trace", "x.deps", "-", "--cluster", "c.toml", "--policy", "latency"]
    profile = (inputs / "x.profile.arrow").read_bytes()
    named = tessera(*words, "-o", "named.plan.toml", stdin=profile)
    piped = tessera(*words, "-o", "-", stdin=profile)
    assert (named.returncode, piped.returncode) == (0, 0), piped.stderr
    assert piped.stdout == (inputs / "named.plan.toml").read_text()
    assert piped.stderr == named.stdout
    run = ["run", "-", "--trace", "x.trace", "--deps", "x.deps", "--backend", "simulate", "-o", "s.run"]
    assert tessera(*run, stdin=piped.stdout.encode()).returncode == 0
