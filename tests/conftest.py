"""What every test shares: the options and markers, and the golden files.

A golden file holds what a test's result looked like when somebody last read it. It is named after
its test (`tests/golden/AREA/test_module/test_name.txt`), and `pytest --golden` (or `just golden`)
rewrites it and runs nothing else.
"""

import difflib
import os
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# Compilers and model libraries cache under HOME unless told otherwise; tests write only to the checkout's
# ignored folders and the temporary folder. Set here, before anything imports torch or Triton.
_CACHE = Path(tempfile.gettempdir()) / f"tessera-tests-{os.getuid()}"
os.environ.setdefault("TRITON_HOME", str(_CACHE))
os.environ.setdefault("XDG_CACHE_HOME", str(_CACHE))
os.environ.setdefault("HF_HOME", str(_CACHE / "huggingface"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two test processes of two threads each would fight for the cores, and sums depend on the thread count.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# The quick tests draw the same examples every time, so that a change is judged by what it changed; the slow run
# draws new ones, and prints how to repeat a failure. No example has a deadline: on a machine that others use as well, a
# first call into a library can take longer than the 200 ms that hypothesis allows, which says nothing of the code.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", print_blob=True, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("searching" if config.getoption("--slow") else "repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--golden", action="store_true", help="rewrite the golden files; run only their tests")


@cache
def _no_gpu_because() -> str | None:
    """Why tests marked gpu can't run here, or None where they can."""
    import torch  # late: most selections hold no gpu test, and the import takes seconds

    if not torch.backends.cuda.is_built():
        return f"needs a CUDA device: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a CUDA device: torch finds none"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--golden"):
        kept = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if item.get_closest_marker("gpu") and (reason := _no_gpu_because()):
            item.add_marker(pytest.mark.skip(reason=reason))


def golden_path(module: Path, test: str, suffix: str = ".txt") -> Path:
    """Where the golden file of a test lies.

    `module` is the test module's path, `test` the test's name with its parameters; what a file name
    can't hold becomes a hyphen.
    """
    folder = TESTS / "golden" / module.relative_to(TESTS).with_suffix("")
    return folder / (re.sub(r"[^\w.=]+", "-", test).strip("-") + suffix)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function that compares a text with the test's golden file: `golden(text, suffix=".txt")`.

    A test that needs several files gives each its own suffix (".ptx", ".boxes.txt").
    """
    rewrite = request.config.getoption("--golden")

    def check(text: str, suffix: str = ".txt") -> None:
        path = golden_path(request.path, request.node.name, suffix)
        if rewrite:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        name = path.relative_to(TESTS.parent)
        if not path.exists():
            pytest.fail(f"{name} is missing; write it with: just golden", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), str(name), "this run", lineterm=""
            )
            pytest.fail("\n".join(["golden differs; if rightly so: just golden", *diff]), pytrace=False)

    return check
