"""The command as a user starts it: most tests call it in this process, some start one of its own."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.artifacts import write_all

ROOT = Path(__file__).parent.parent.parent
SEARCH = os.pathsep.join(str(ROOT / folder) for folder in ("formats", "cli", "."))
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def tessera(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """`tessera(*words, stdin=b"")` in an empty folder, without the cost of a new interpreter."""
    from tessera_cli.main import main

    def run(*words: object, stdin: bytes = b"") -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return subprocess.CompletedProcess(words, end.value.code, out, err)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Done]:
    """Like `tessera`, in a process of its own, as a shell would start it."""

    def run(*words: object, stdin: bytes = b"", timeout: float = 60) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "tessera_cli", *map(str, words)],
            cwd=tmp_path,
            input=stdin.decode(),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": SEARCH, "COLUMNS": "100", "TERM": "dumb"},
            check=False,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one artifact of every kind; copy before you damage."""
    folder = tmp_path_factory.mktemp("made")
    write_all(folder)
    return folder
