"""What a shard's trace holds: the weights' parts, groups of tied kernels, and one clear line where it can't be made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tessera_core.program.ir import Trace
from tessera_core.program.memory import view_of
from tessera_core.program.store import load_trace, trace_tables
from tessera_core.program.weights import materialise_weights
from tessera_core.trace.build import trace_model
from tessera_core.trace.fake import new_fake_mode
from tessera_core.trace.fused.table import SHARD_OPERATORS
from tessera_core.trace.parallel.shard import build_shard
from tessera_core.trace.parallel.shares import Shard
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.stage import TraceStage
from tessera_formats.errors import InputError, ModelError, TesseraError
from tessera_formats.trace import program_digest
from tests.trace.parallel.conftest import CASES, REQUESTS, SEED, Shared
from tests.trace.parallel.test_replay import part

NAMES = [name for name, _ in CASES]


def weights_of(trace: Trace, file: Path | None = None) -> dict[str, torch.Tensor]:
    storages = materialise_weights(trace, {weight.buffer for weight in trace.weights}, file)
    return {w.name: view_of(storages[w.buffer], trace.tensors[w.tensor]) for w in trace.weights}


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_all_ranks_are_the_whole_weights_bit_for_bit(
    name: str, shared_models: Mapping[str, Shared]
) -> None:
    shared = shared_models[name]
    whole, parts = weights_of(shared.whole), [weights_of(trace) for trace in shared.ranks]
    inits = [{weight.name: weight.init for weight in trace.weights} for trace in shared.ranks]
    assert inits[0].keys() == whole.keys()
    for weight, value in whole.items():
        held = [index for index, init in enumerate(inits) if weight in init]
        covered: dict[int, int] = defaultdict(int)
        for rank in held:
            cut = inits[rank][weight].get("slice")
            assert torch.equal(parts[rank][weight], part(value, cut)), (weight, rank)
            for first, last in cut["ranges"] if cut else []:
                for index in range(first, last):
                    covered[index] += 1
        cut = inits[0][weight].get("slice")
        if cut is not None:
            assert covered == dict.fromkeys(range(cut["extent"]), 1), weight
        assert held == [0, 1] or (held == [0] and weight.endswith("down_proj_bias"))


@pytest.mark.parametrize("name", NAMES)
def test_only_norms_routers_and_what_the_plan_leaves_whole_are_on_every_rank(
    name: str, shared_models: Mapping[str, Shared]
) -> None:
    for trace in shared_models[name].ranks:
        whole = [w.name for w in trace.weights if "slice" not in w.init]
        known = (
            "norm",
            "inv_freq",
            "router",
            "gate.",
            "o_proj.bias",
            "down_proj_bias",
            "visual.",
            "kv_a",
            "q_a",
        )
        assert [w for w in whole if not any(part in w for part in known)] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_group_is_what_one_collective_joins(name: str, shared_models: Mapping[str, Shared]) -> None:
    """Its only collective comes last, and nothing but the collective's result leaves it for kernels outside."""
    for trace in shared_models[name].ranks:
        for program in trace.programs:
            groups = program.ties()
            assert [
                g for g in groups for k in g if program.kernels[k].kind == "collective" and k != g[-1]
            ] == []
            assert all(program.kernels[g[-1]].kind == "collective" for g in groups)
            assert len(groups) == sum(kernel.kind == "collective" for kernel in program.kernels)
            group_of = {kernel.id: kernel.group for kernel in program.kernels}
            made: dict[int, int] = {}
            for op in program.ops:
                kernel = program.kernels[op.kernel]
                for tensor in op.inputs:
                    buffer = trace.tensors[tensor].buffer
                    source = made.get(buffer)
                    if source is None or group_of[source] is None:
                        continue
                    joined = program.kernels[source].kind == "collective"
                    assert joined or group_of[op.kernel] == group_of[source], (kernel.name, source)
                for tensor in op.outputs:
                    made[trace.tensors[tensor].buffer] = op.kernel


def test_replicated_norms_and_sums_are_free(shared_models: Mapping[str, Shared]) -> None:
    (_, decode) = shared_models["llama-tiny"].ranks[0].programs
    free = [kernel.name for kernel in decode.kernels if kernel.group is None]
    assert sum("layernorm" in name for name in free) == 8
    tied = [kernel.name for kernel in decode.kernels if kernel.group is not None]
    assert sum("scaled_dot_product" in name for name in tied) == 4
    assert not any("norm" in name for name in tied)


def test_ranks_and_shares_have_programs_of_their_own(shared_models: Mapping[str, Shared]) -> None:
    digests = [trace.digest for shared in shared_models.values() for trace in (shared.whole, *shared.ranks)]
    assert len(set(digests)) == len(digests)


def test_a_weights_file_of_the_whole_model_serves_every_rank(
    shared_models: Mapping[str, Shared], tmp_path: Path
) -> None:
    shared = shared_models["gpt-oss-tiny"]
    values = {name: value + 1 for name, value in weights_of(shared.whole).items()}
    file = tmp_path / "whole.safetensors"
    safetensors.torch.save_file(values, file)
    for trace in shared.ranks:
        cuts = {weight.name: weight.init.get("slice") for weight in trace.weights}
        for name, value in weights_of(trace, file).items():
            assert torch.equal(value, part(values[name], cuts[name])), name
    safetensors.torch.save_file({**values, "lm_head.weight": values["lm_head.weight"][:100]}, file)
    with pytest.raises(InputError, match=r"lm_head.*pass the unsharded model's weights"):
        weights_of(shared.ranks[0], file)


def test_collectives_say_what_they_move(shared_models: Mapping[str, Shared]) -> None:
    _, decode = shared_models["llama-tiny"].ranks[1].programs
    reduce = next(kernel for kernel in decode.kernels if "all_reduce" in kernel.name)
    gather = next(kernel for kernel in decode.kernels if "all_gather" in kernel.name)
    hidden, vocabulary = 2 * 320 * 4, 2 * 1024 * 4
    assert (reduce.read_bytes, reduce.written_bytes, reduce.flops) == (hidden, hidden, hidden // 4 // 2)
    assert (gather.read_bytes, gather.written_bytes, gather.flops) == (vocabulary // 2, vocabulary, 0)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-oss-tiny", "mamba-codestral-tiny"])
def test_fake_shards_equal_real_ones(name: str, shared_models: Mapping[str, Shared]) -> None:
    for rank, real in enumerate(shared_models[name].ranks):
        mode = new_fake_mode()
        model = build_shard(name, None, SEED, Shard((1, 1), rank), mode)
        found = trace_model(model, REQUESTS, seed=SEED, fake_mode=mode, versions={}).trace
        digests = {program_digest(trace_tables(trace), trace.constants) for trace in (real, found)}
        assert len(digests) == 1
        for program, twin in zip(real.programs, found.programs, strict=True):
            for field in ("signature", "group", "flops", "read_bytes"):
                assert [getattr(k, field) for k in twin.kernels] == [
                    getattr(k, field) for k in program.kernels
                ]


def test_every_operator_of_shards_is_used(shared_models: Mapping[str, Shared]) -> None:
    traces = [trace for shared in shared_models.values() for trace in shared.ranks]
    used = {op.target.split(".")[1] for trace in traces for program in trace.programs for op in program.ops}
    assert used >= SHARD_OPERATORS


FACTORY = """
import torch
from tessera_core.trace.parallel.plan import Join, ParallelPlan, Split
from tessera_core.trace.parallel.shares import Dimension

class Model:
    feeds, states = {}, ()
    recipes = {"0.weight": {"kind": "normal", "std": 1.0}, "1.weight": {"kind": "normal", "std": 1.0}}
    splits = (Split(tensor="0.weight", axis=0, dimension="rows"), Split(tensor="1.weight", axis=1, dimension="rows"))
    joins = (Join(module="1", how="all_reduce"),)
    def __init__(self, dtype):
        self.module = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(2)))
    def make_state(self, request): return {}
    def make_inputs(self, request): return {"x": torch.ones(request.batch, 8)}
    def step(self, request, inputs, state): return {"y": self.module(inputs["x"])}
    def guards(self, request): return ()
    def parallel_plan(self):
        return ParallelPlan(dimensions=(Dimension(name="rows", extent=8),), splits=self.splits, joins=self.joins)

def good(*, dtype, seed): return Model(dtype)
def unjoined(*, dtype, seed):
    model = Model(dtype)
    model.joins = ()
    return model
def misnamed(*, dtype, seed):
    model = Model(dtype)
    model.joins = (Join(module="2", how="all_reduce"),)
    return model
def uncut(*, dtype, seed):
    model = Model(dtype)
    model.splits = ()
    return model
def other(*, dtype, seed):
    model = Model(dtype)
    model.splits = (Split(tensor="0.weight", axis=0, dimension="columns"),)
    return model
def without(*, dtype, seed):
    model = Model(dtype)
    model.recipes = None
    return model
def failing(*, dtype, seed):
    model = Model(dtype)
    model.parallel_plan = lambda: 1 // 0
    return model
"""


def stage(model: str, shares: str | None = "2", rank: int = 0) -> TraceStage:
    return TraceStage(
        model=model, programs=(ProgramRequest("step", 2, 8),), tensor_parallel=shares, rank=rank
    )


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "shared_model.py"
    path.write_text(FACTORY)
    return path


def test_a_users_model_declares_its_own_plan(factory: Path, tmp_path: Path) -> None:
    stage(f"{factory}:good", "3,1", 1).run(tmp_path / "x.trace")
    trace = load_trace(tmp_path / "x.trace")
    assert (trace.info["tensor_parallel"], trace.info["rank"]) == ([3, 1], 1)
    assert [trace.tensors[weight.tensor].shape for weight in trace.weights] == [(2, 8), (8, 2)]
    assert [kernel.kind for kernel in trace.programs[0].kernels] == ["matmul", "matmul", "collective"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unjoined", "output y is one rank's part, and nothing joins it"),
        ("misnamed", "names module 2, which it lacks"),
        ("uncut", "cuts nothing"),
        ("other", "no dimension 'columns'"),
        ("without", "no recipes"),
        ("failing", "ZeroDivisionError"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(
    name: str, said: str, factory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        stage(f"{factory}:{name}").run(tmp_path / "x.trace")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.trace").exists()


@pytest.mark.parametrize(
    ("model", "shares", "rank", "said"),
    [
        (
            "llama-3-8b",
            "3",
            0,
            "8 key-value heads can't be shared equally by 3 ranks; use --tensor-parallel 3,3,2",
        ),
        ("llama-3-8b", "16", 0, "8 key-value heads can't be shared by 16 ranks; use at most 8"),
        ("qwen3-tiny", "9,1", 0, "rank 1 would get none; use --tensor-parallel 1,1"),
        ("stable-diffusion-3.5-tiny", "2", 0, "declares no parallel_plan"),
        ("llama-tiny", "2", 2, "there are 2 ranks"),
        ("llama-tiny", None, 1, "add --tensor-parallel"),
    ],
)
def test_what_cannot_be_shared_is_said_in_one_line(
    model: str, shares: str | None, rank: int, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    with pytest.raises(TesseraError, match=said) as caught:
        replace(stage(model, shares, rank), fake=True).run(tmp_path / "x.trace")
    assert "\n" not in str(caught.value)


def test_a_fake_shard_has_no_memory() -> None:
    pytest.importorskip("transformers")
    mode = new_fake_mode()
    built = build_shard("llama-3-8b", None, 0, Shard((2, 1), 1), mode)
    parameters = dict(built.model.module.named_parameters())
    assert {type(p.data).__name__ for p in parameters.values() if p.numel() > 1 << 19} == {"FakeTensor"}
    assert parameters["model.layers.0.self_attn.k_proj.weight"].shape == (3 * 128, 4096)
