"""The house itself: what a plain start imports, where things lie, and that what is declared, pinned
and written down agrees.
"""

import ast
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = {"tessera_formats": "formats", "tessera_core": ".", "tessera_cli": "cli"}
SOURCES = sorted(path for name, folder in PACKAGES.items() for path in (ROOT / folder / name).rglob("*.py"))
HEAVY = {"torch", "triton", "transformers", "scipy", "highspy"}


def modules_loaded_by(code: str) -> set[str]:
    """The top-level names in sys.modules after a fresh interpreter has run `code`."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    search = os.pathsep.join(str(ROOT / folder) for folder in dict.fromkeys(PACKAGES.values()))
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_command_starts_without_heavy_modules() -> None:
    assert modules_loaded_by("import tessera_cli.main") & HEAVY == set()


@pytest.mark.parametrize(
    "package",
    ["tessera_formats", "tessera_core.ptx", "tessera_core.deps", "tessera_core.plan", "tessera_core.adapt"],
)
def test_planning_runs_without_torch_and_triton(package: str) -> None:
    """Every module of the package is imported, not only its front door."""
    code = (
        f"import importlib, pkgutil, {package} as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )
    assert modules_loaded_by(code) & {"torch", "triton", "transformers"} == set()


@pytest.mark.serial
def test_help_appears_quickly() -> None:
    """Best of three: the bar is about what we import, not about what else the machine is doing."""
    code = "from tessera_cli.main import main; import sys; sys.argv = ['tessera', '--help']; main()"
    search = os.pathsep.join(str(ROOT / folder) for folder in dict.fromkeys(PACKAGES.values()))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": search},
            check=False,
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 2.0


def test_top_level_folders_and_files_are_there() -> None:
    folders = ["cli", "tessera_core", "formats", "tests", "fixtures", "docs", "benchmarks"]
    files = ["pyproject.toml", "Justfile", "README.md", "LICENSE", "CHANGELOG.md", ".ci/run"]
    assert [name for name in folders if not (ROOT / name).is_dir()] == []
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_packages_are_typed() -> None:
    missing = [name for name, folder in PACKAGES.items() if not (ROOT / folder / name / "py.typed").is_file()]
    assert missing == []


def test_folders_of_modules_are_packages() -> None:
    """A folder without __init__.py works in a checkout, and fails in ways of its own when installed."""
    assert sorted({str(p.parent) for p in SOURCES if not (p.parent / "__init__.py").is_file()}) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_open_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_recipes_have_a_line_above() -> None:
    lines = (ROOT / "Justfile").read_text(encoding="utf-8").splitlines()
    recipes = [n for n, line in enumerate(lines) if re.match(r"[a-z_][\w-]*[^:=]*:(?!=)", line)]
    assert {"demo", "test", "test-slow", "lint", "bench", "golden", "wheel"} <= {
        re.split(r"[ :]", lines[n])[0] for n in recipes
    }
    assert [lines[n] for n in recipes if not lines[n - 1].startswith("# ")] == []


def test_declared_dependencies_are_pinned_within_their_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    declared = [Requirement(text) for text in project["dependencies"]]
    declared += [Requirement(text) for extra in project["optional-dependencies"].values() for text in extra]
    outside = [
        str(need)
        for need in declared
        if canonicalize_name(need.name) not in pinned
        or pinned[canonicalize_name(need.name)] not in need.specifier
    ]
    assert outside == []


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = [
        Requirement(need).name
        for need in project["dependencies"] + project["optional-dependencies"]["models"]
    ]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_changelog_knows_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(
        rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )


def test_goldens_belong_to_tests() -> None:
    """A golden file whose test is gone would never be read again."""
    orphans = []
    for path in (ROOT / "tests" / "golden").rglob("*"):
        if path.is_file():
            module = ROOT / "tests" / path.parent.relative_to(ROOT / "tests" / "golden").with_suffix(".py")
            name = re.match(r"test_\w+", path.name)
            if not (name and module.is_file() and f"def {name[0]}" in module.read_text(encoding="utf-8")):
                orphans.append(str(path.relative_to(ROOT)))
    assert orphans == []
