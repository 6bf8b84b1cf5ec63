"""The worked kernels of docs/ptx-theorem.md: the page's PTX, by the page's command, gives the page's output."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from tessera_core.deps.module import ModuleStage, parse_extent
from tessera_core.report.text import render

PAGE = Path(__file__).parents[2] / "docs" / "ptx-theorem.md"
KERNEL = re.compile(r"```ptx\n(.*?)```\n\n```sh\n(.*?)\n```\n\n```text\n(.*?)```", re.S)


def test_the_pages_kernels_give_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    found = KERNEL.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == 2
    for text, command, output in found:
        words = shlex.split(command)
        options = dict(zip(words[2::2], words[3::2], strict=True))
        arguments = tuple(value for name, value in pairwise(words) if name == "--arg")
        path = tmp_path / options["--module"]
        path.write_text(text, encoding="utf-8")
        shown = render(
            ModuleStage(grid=parse_extent("--grid", options["--grid"]), arguments=arguments).run(path)
        )
        assert shown[shown.index("accesses\n") :].rstrip() == output.rstrip()
