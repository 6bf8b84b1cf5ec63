"""The factory that the documentation shows: pasted into a file, it is traced, and replayed as it runs by itself."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_core.program.generate import generate
from tessera_core.program.store import load_trace
from tessera_core.program.weights import random_inputs
from tessera_core.trace.request import ProgramRequest, parse_program
from tessera_core.trace.stage import TraceStage
from tessera_formats.errors import GuardError

PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    (source,) = re.findall(r"^```python\n(.*?^def factory\(.*?)^```$", PAGE, re.M | re.S)
    path = tmp_path / "shown_recurrent.py"
    path.write_text(source.rpartition("```python\n")[2])
    return path


def alone(
    model: Any, requests: tuple[ProgramRequest, ...], prompts: torch.Tensor, tokens: int
) -> torch.Tensor:
    """What the model generates for one prompt, outside the toolchain, int64 (1, tokens)."""
    prefill, decode = (ProgramRequest(request.phase, 1, request.context) for request in requests)
    first, state = model.make_state(prefill), model.make_state(decode)
    made = [model.step(prefill, {"tokens": prompts}, first)["next_token"]]
    for name, value in first.items():
        (state[name][:, : value.shape[1]] if name == "seen" else state[name]).copy_(value)
    while len(made) < tokens:
        made.append(model.step(decode, {"tokens": made[-1]}, state)["next_token"])
    return torch.cat(made, dim=1)


def test_the_factory_that_the_page_shows_works(example: Path, tmp_path: Path) -> None:
    requests = tuple(parse_program(text) for text in re.findall(r"--program (\S+)", PAGE)[-2:])
    facts = TraceStage(model=f"{example}:factory", programs=requests, seed=3).run(tmp_path / "r.trace")
    assert facts.values["replayable"] is True and facts.values["notes"] == []
    trace = load_trace(tmp_path / "r.trace")
    prefill, decode = trace.programs
    found = generate(trace, prefill, decode, [5, 6, 7], 13, trusted=True)
    namespace: dict[str, Any] = {}
    exec(compile(example.read_text(), "shown", "exec"), namespace)
    model = namespace["factory"](dtype=torch.float32, seed=3)
    with torch.no_grad():
        for row, request in enumerate((5, 6, 7)):
            prompt = random_inputs(trace, prefill, 0, [request])["tokens"]
            assert torch.equal(found[row : row + 1], alone(model, requests, prompt, 13))
    with pytest.raises(GuardError, match="with a prompt of 4 tokens, 13 output tokens fit"):
        generate(trace, prefill, decode, [5], 14, trusted=True)
