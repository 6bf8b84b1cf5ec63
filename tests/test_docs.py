"""The documentation is tested: each command has help and a page, and each command line that the
README or a page shows names a subcommand, options and choices that exist.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=ticks)\s*$", re.M | re.S)
SHELL = {"sh", "bash", "shell", "console", "text", ""}
SEPARATORS = {"|", "||", "&&", ";", "&"}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def root_command() -> Any:
    """The tree of commands as the command line parser sees it."""
    import typer

    from tessera_cli.main import app

    return typer.main.get_command(app)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command below `command` with the words that lead to it, groups included."""
    for name, child in getattr(command, "commands", {}).items():
        yield (*path, name), child
        yield from walk(child, (*path, name))


def command_lines(markdown: str) -> Iterator[list[str]]:
    """The words after `tessera` of each command line in the fenced blocks of a page.

    Brackets of a synopsis are dropped: `[--target sm_90]` is checked like `--target sm_90`.
    """
    for block in FENCE.finditer(markdown):
        if block["language"] not in SHELL:
            continue
        for line in block["body"].replace("\\\n", " ").splitlines():
            if "tessera " not in line:
                continue
            line = re.sub(r"\s\d?>{1,2}&?\s*\S+|\s<\s*\S+|[\[\]]", " ", line.strip().removeprefix("$ "))
            words: list[str] = []
            for word in [*shlex.split(line.replace(";", " ; "), comments=True), ";"]:
                if word not in SEPARATORS:
                    words.append(word)
                    continue
                for place, candidate in enumerate(words):
                    if Path(candidate).name == "tessera":
                        yield words[place + 1 :]
                        break
                words = []


def choices_of(option: Any) -> set[str]:
    """The words that an option takes, where it takes only some: a Literal or an Enum."""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    if get_origin(annotation) is Literal:
        return {str(choice) for choice in get_args(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {str(choice.value) for choice in annotation}
    return set()


def fault_of(root: Any, words: list[str]) -> str | None:
    """What is wrong with a command line, or None."""
    command = root
    rest = list(words)
    while rest and getattr(command, "commands", None) and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"no such command: {rest[0]}"
        command = command.commands[rest.pop(0)]
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if not name.startswith("-") or name in {"-", "--", "--help", "..."}:
            continue
        if name not in options:
            return f"no such option: {name}"
        if getattr(options[name], "is_flag", False):
            continue
        if not value:
            if not rest:
                return f"option without a value: {name}"
            value = rest.pop(0)
        allowed = choices_of(options[name])
        if allowed and not value.startswith("$"):
            for choice in value.split("|"):
                if choice not in allowed:
                    return f"{name} takes {sorted(allowed)}, not {choice}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_command_lines_exist(page: Path, root_command: Any) -> None:
    shown = list(command_lines(page.read_text(encoding="utf-8")))
    faults = {shlex.join(["tessera", *words]): fault_of(root_command, words) for words in shown}
    assert {line: fault for line, fault in faults.items() if fault} == {}


def test_the_reader_of_command_lines_finds_faults() -> None:
    """The check above must be able to fail: a stand-in tree, right and wrong lines."""
    import typer

    app = typer.Typer()

    @app.command("run")
    def run(
        plan: str,
        verify: bool = typer.Option(False, "--verify"),
        backend: Literal["auto", "simulate"] = typer.Option("auto", "--backend"),
        out: str = typer.Option(..., "-o"),
    ) -> None:
        """Run."""

    @app.command("other")
    def other() -> None:
        """Another, so that the app is a group."""

    root = typer.main.get_command(app)
    page = (
        "tessera outside a block\n```sh\n"
        "for p in a b; do tessera run $p --verify -o \\\n  x.run; done\n"
        "X=1 .venv/bin/tessera run - [-o x.run] | tessera walk 2>/dev/null # tessera none\n"
        "tessera run x --trace t > x.txt\n"
        "tessera run x --backend=auto|simulate && tessera run x --backend fast\n```\n"
    )
    assert [(words, fault_of(root, words)) for words in command_lines(page)] == [
        (["run", "$p", "--verify", "-o", "x.run"], None),
        (["run", "-", "-o", "x.run"], None),
        (["walk"], "no such command: walk"),
        (["run", "x", "--trace", "t"], "no such option: --trace"),
        (["run", "x", "--backend=auto|simulate"], None),
        (["run", "x", "--backend", "fast"], "--backend takes ['auto', 'simulate'], not fast"),
    ]


def test_readme_shows_every_stage(root_command: Any) -> None:
    """The pipeline in the README goes through all six stages."""
    shown = {words[0] for words in command_lines((ROOT / "README.md").read_text(encoding="utf-8")) if words}
    assert {"trace", "ptx-deps", "profile", "partition", "run", "adapt"} <= shown


def test_every_command_has_help(root_command: Any) -> None:
    commands = dict(walk(root_command))
    assert commands
    assert [" ".join(path) for path, command in commands.items() if not (command.help or "").strip()] == []


def test_every_option_and_argument_has_help(root_command: Any) -> None:
    silent = [
        " ".join([*path, *parameter.opts])
        for path, command in [((), root_command), *walk(root_command)]
        for parameter in command.params
        if not (getattr(parameter, "help", None) or "").strip()
    ]
    assert silent == []


def test_every_command_has_a_page(root_command: Any) -> None:
    missing = [name for name in root_command.commands if not (ROOT / "docs" / f"{name}.md").is_file()]
    assert missing == []


def test_every_page_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {
        page.relative_to(ROOT / "docs").as_posix()
        for page in PAGES
        if page.name not in {"README.md", "index.md"}
    }
    assert {page for page in pages if f"]({page})" not in index} == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_within_the_repository_resolve(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    broken = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_recipes_that_are_shown_exist(page: Path) -> None:
    recipes = set(
        re.findall(r"^([a-z][\w-]*)[^:=\n]*:(?!=)", (ROOT / "Justfile").read_text(encoding="utf-8"), re.M)
    )
    shown = set(re.findall(r"(?:`|\bin/|^)just ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.M))
    assert shown <= recipes


@pytest.mark.parametrize("example", sorted((ROOT / "docs" / "examples").glob("*.toml")), ids=page_id)
def test_examples_load(example: Path) -> None:
    from tessera_formats.cluster import read_cluster
    from tessera_formats.workload import read_workload

    text = example.read_text(encoding="utf-8")
    document = read_cluster(example) if "[[device]]" in text else read_workload(example)
    assert document


@pytest.mark.serial
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "pipeline.md"], ids=page_id)
def test_pipelines_run_as_shown(page: Path, tmp_path: Path) -> None:
    """The block that goes from `tessera trace` to `tessera adapt`, pasted into a shell in an empty folder."""
    blocks = [block["body"] for block in FENCE.finditer(page.read_text(encoding="utf-8"))]
    (pipeline,) = [body for body in blocks if "tessera trace " in body and "tessera adapt " in body]
    assert len(pipeline.splitlines()) == 6
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    binaries = Path(sys.executable).parent
    assert (binaries / "tessera").is_file(), f"no tessera in {binaries}; install with: just test"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", pipeline],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = ["x.trace", "x.deps", "x.profile.arrow", "throughput.plan.toml", "x.run", "x.adapt"]
    assert [name for name in wanted if not (tmp_path / name).exists()] == []
