"""Tiny models traced whole and in shards, once for all tests of the folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace, save_trace
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import BuiltModel, build
from tessera_core.trace.fake import building, new_fake_mode
from tessera_core.trace.models import model_shape
from tessera_core.trace.parallel.shard import shard_model
from tessera_core.trace.parallel.shares import parse_shard
from tessera_core.trace.request import ProgramRequest

SEED = 3
REQUESTS = (ProgramRequest("prefill", 1, 16), ProgramRequest("decode", 2, 24))

CASES = (
    ("llama-tiny", "2"),
    ("llama-three", "2,1"),  # three key-value heads, so that heads are shared unevenly too
    ("gpt-oss-tiny", "2"),  # columns 64,32: whole blocks; biases on products cut either way
    ("qwen3-tiny", "2,1"),
    ("deepseek-tiny", "3,1"),
    ("mamba-codestral-tiny", "2"),
    ("qwen2.5-vl-tiny", "2"),
)
"""Each of two ranks, so that one pair of processes can replay them all."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A model's whole trace and those of its ranks, with their paths."""

    whole: Trace
    ranks: tuple[Trace, ...]
    whole_path: Path
    paths: tuple[Path, ...]


def built(name: str, fake: bool) -> BuiltModel:
    """A catalogued model or ``llama-three``; without memory where ``fake``."""
    fake_mode = new_fake_mode() if fake else None
    if name != "llama-three":
        return build(name, None, SEED, fake_mode)
    from tessera_core.trace.models.llama import LlamaModel
    from tessera_core.trace.models.shapes import LlamaShape

    shape = model_shape("llama-tiny")
    assert isinstance(shape, LlamaShape)
    changed = replace(shape, name=name, layers=2, hidden=192, heads=6, key_heads=3, intermediate=260)
    with building(fake_mode):
        model = LlamaModel(changed, dtype=torch.float32, seed=SEED)
    return BuiltModel(model, {"model": name, "source": "catalogue"}, "float32")


@pytest.fixture(scope="session")
def shared_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shared]:
    """Every case by its model's name."""
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("shards")

    def traced(model: BuiltModel, path: Path) -> Trace:
        found = trace_model(model, REQUESTS, seed=SEED, fake_mode=None, versions={})
        save_trace(path, found.trace)
        return load_trace(path)

    made: dict[str, Shared] = {}
    for name, shares in CASES:
        paths = tuple(folder / f"{name}.{rank}.trace" for rank in range(2))
        whole_path = folder / f"{name}.trace"
        made[name] = Shared(
            whole=traced(built(name, fake=False), whole_path),
            ranks=tuple(
                traced(shard_model(built(name, fake=True), SEED, parse_shard(shares, rank), None), path)
                for rank, path in enumerate(paths)
            ),
            whole_path=whole_path,
            paths=paths,
        )
    return made
