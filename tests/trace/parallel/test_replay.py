"""Ranks that replay their shards with real collectives give what the unsharded program gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trace.parallel.conftest import CASES, Shared
from tests.trace.parallel.rank import replay

TOLERANCE = 2e-5
"""Of float32 sums taken in another order, relative to the largest value of a tensor."""

Replayed = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def replayed(
    shared_models: Mapping[str, Shared], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Replayed, ...]]:
    """By model, what each of two ranks found; both are processes of their own."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("rank.py")),
                str(rank),
                "2",
                str(folder / "rendezvous"),
                json.dumps(
                    [(str(s.paths[rank]), str(folder / f"{n}.{rank}")) for n, s in shared_models.items()]
                ),
            ],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors
    return {name: tuple(torch.load(folder / f"{name}.{rank}") for rank in range(2)) for name in shared_models}


def part(whole: torch.Tensor, cut: Mapping[str, Any] | None) -> torch.Tensor:
    """What of a whole tensor a slice names."""
    if cut is None:
        return whole
    return torch.cat([whole.narrow(cut["axis"], a, b - a) for a, b in cut["ranges"]], dim=cut["axis"])


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_ranks_together_give_what_the_whole_gives(
    name: str, shared_models: Mapping[str, Shared], replayed: Mapping[str, tuple[Replayed, ...]]
) -> None:
    shared = shared_models[name]
    expected = replay(shared.whole_path)
    for trace, found in zip(shared.ranks, replayed[name], strict=True):
        slices = {f"state {state.name}": state.init.get("slice") for state in trace.states}
        for program, tensors in expected.items():
            assert found[program].keys() == tensors.keys()
            for what, whole in tensors.items():
                own = part(whole, slices.get(what))
                if own.dtype.is_floating_point:
                    bound = TOLERANCE * max(1.0, float(whole.abs().max()))
                    torch.testing.assert_close(found[program][what], own, rtol=0, atol=bound)
                else:
                    assert torch.equal(found[program][what], own), (program, what)


def test_states_are_cut_and_not_only_copied(shared_models: Mapping[str, Shared]) -> None:
    """The comparison above would hold for ranks that keep everything."""
    for name, shared in shared_models.items():
        cut = [sum("slice" in state.init for state in trace.states) for trace in shared.ranks]
        assert all(cut) or name == "deepseek-tiny", name
