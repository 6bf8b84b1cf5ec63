"""Small exported programs and hand-written profiles in the public formats."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import tessera as tessera

FIXTURES = Path(__file__).parents[3] / "fixtures" / "imports"
BATCH, ROWS, WIDTH, VOCABULARY = 2, 16, 32, 50


CLUSTER = """
[[device]]
name = "first"
type = "{}"
[[device]]
name = "second"
type = "{}"
[[link]]
between = ["first", "second"]
gbit_per_s = 200
latency_us = 5
"""

ONE_CPU = """
[[device]]
name = "only"
type = "cpu-1thread"
"""


def ok(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that worked printed."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that refused its input."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    (text,) = done.stderr.splitlines()
    assert text.startswith("tessera: ") and "internal error" not in text
    return text


class CachedBlock(torch.nn.Module):
    """One attention over a cache that each step appends to, two layers, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.query = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(BATCH, ROWS, WIDTH))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embed(tokens)) + self.angles
        self.cache.index_copy_(1, self.position, self.query(hidden))
        mask = torch.arange(ROWS) > self.position
        scores = (hidden @ self.cache.transpose(1, 2)).masked_fill(mask, float("-inf"))
        hidden = hidden + torch.softmax(scores * torch.tensor(0.5), -1) @ self.cache
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        self.position.add_(1)
        logits = self.head(hidden)
        return {"logits": logits, "next_token": logits.argmax(-1)}


class Rows(torch.nn.Module):
    """Sizes that the export leaves open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.relu(self.mix(x)).reshape(x.shape[0] * x.shape[1], 8)
        return mixed.reshape(x.shape)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``block.pt2`` (static, with state) and ``rows.pt2`` (open batch and context)."""
    folder = tmp_path_factory.mktemp("exported")
    tokens = torch.tensor([[3], [7]])
    torch.export.save(torch.export.export(CachedBlock().eval(), (tokens,)), folder / "block.pt2")
    open_sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    rows = torch.export.export(Rows().eval(), (torch.randn(3, 5, 8),), dynamic_shapes=open_sizes)
    torch.export.save(rows, folder / "rows.pt2")
    return folder


Event = dict[str, Any]


def cpu_op(name: str, start: float, end: float, number: int, dims: Any = (), types: Any = ()) -> Event:
    args = {"External id": number, "Record function id": number, "Input Dims": dims, "Input type": types}
    return _event("cpu_op", name, start, end - start, 10, args)


def launch(name: str, at: float, number: int, external: int, **more: Any) -> list[Event]:
    """The call that launches, and the kernel that it launched."""
    category = more.pop("cat", "kernel")
    args = {"External id": external, "correlation": number, "device": 0, "stream": 7, "grid": [4, 1, 1]}
    args |= {"block": [64, 1, 1], "shared memory": 16, "registers per thread": 32} | more
    call = {"External id": external, "correlation": number}
    return [
        _event("cuda_runtime", "cudaLaunchKernel", at, 1.0, 10, call),
        _event(category, name, 1000 + 10 * number, 2.0 + number, 7, args),
    ]


def step(number: int, start: float, end: float) -> Event:
    return _event("user_annotation", f"ProfilerStep#{number}", start, end - start, 10, {})


def _event(category: str, name: str, start: float, length: float, thread: int, args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length} | {
        "args": args
    }


def profile_text(events: list[Event], gpu: str = "NVIDIA H200") -> str:
    return json.dumps(
        {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": gpu}], "traceEvents": events}
    )


@pytest.fixture
def write_profile(tmp_path: Path) -> Callable[..., Path]:
    """Write events as ``NAME`` in the test's folder."""

    def write(events: list[Event], name: str = "p.json", gpu: str = "NVIDIA H200") -> Path:
        path = tmp_path / name
        path.write_text(profile_text(events, gpu))
        return path

    return write


TWO_STEPS = [
    step(1, 0, 50),
    cpu_op("aten::mm", 10, 20, 1, [[4, 8], [8, 16]], ["c10::BFloat16", "c10::BFloat16"]),
    *launch("gemm", 12, 1, 1),
    step(2, 50, 100),
    cpu_op("aten::linear", 55, 75, 2, [[4, 8], [16, 8]], ["c10::BFloat16", "c10::BFloat16"]),
    cpu_op("aten::mm", 60, 70, 3, [[4, 8], [8, 16]], ["c10::BFloat16", "c10::BFloat16"]),
    *launch("gemm_part", 62, 2, 3),
    *launch("gemm_reduce", 65, 3, 3),
    cpu_op("aten::relu_", 80, 90, 4, [[4, 16]], ["c10::BFloat16"]),
    *launch("relu", 82, 4, 4),
]
