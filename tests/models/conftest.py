"""Each catalogued model that fits into memory, traced once, beside its eager original."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tessera_core.program.ir import Program, Trace
from tessera_core.program.store import load_trace, save_trace
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import build
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import TesseraError

SEED = 3
PREFILL = ProgramRequest("prefill", 1, 16)
DECODE = ProgramRequest("decode", 4, 64)


LANGUAGE_MODELS = (
    "llama-tiny",
    "qwen2.5-tiny",
    "gpt-oss-tiny",
    "qwen3-tiny",
    "deepseek-tiny",
    "mamba-codestral-tiny",
    "qwen2.5-vl-tiny",
    "demo",
)


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model of its own (not the one that was traced) and the trace as read back from disk."""

    model: TraceableModel
    trace: Trace

    @property
    def prefill(self) -> Program:
        return self.trace.program(PREFILL.name)

    @property
    def decode(self) -> Program:
        return self.trace.program(DECODE.name)


@pytest.fixture(scope="session", params=LANGUAGE_MODELS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TracedModel:
    pytest.importorskip("triton" if request.param == "demo" else "transformers")
    torch.set_num_threads(1)
    built = build(request.param, None, SEED, None)
    found = trace_model(built, (PREFILL, DECODE), seed=SEED, fake_mode=None, versions={})
    path = tmp_path_factory.mktemp("models") / f"{request.param}.trace"
    save_trace(path, found.trace)
    return TracedModel(build(request.param, None, SEED, None).model, load_trace(path))


@pytest.fixture
def eager_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside tracing too, a launch runs as its author says it does on a CPU."""
    jit = pytest.importorskip("triton.runtime.jit")
    from tessera_core.trace.declare import declaration_of

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        declaration = declaration_of(kernel)
        assert declaration is not None
        declaration.implementation(**kernel.signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(jit.JITFunction, "run", run)


@pytest.fixture
def one_line() -> Callable[[pytest.ExceptionInfo[TesseraError]], str]:
    """The message of an error, after checking that it is one line."""

    def check(caught: pytest.ExceptionInfo[TesseraError]) -> str:
        text = str(caught.value)
        assert text
        assert "\n" not in text
        return text

    return check
