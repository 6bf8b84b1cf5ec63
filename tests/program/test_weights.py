"""Weights, constants, state and inputs: pure functions of seed and name, or of a file that is checked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tessera_core.program.memory import view_of
from tessera_core.program.weights import (
    fill,
    initial_state,
    initialise_module,
    materialise_weights,
    random_inputs,
)
from tessera_formats.errors import ArtifactError, InputError, TrustError


@pytest.fixture
def model(writer: Any) -> Any:
    """Two random weights, one of ones, and a constant."""
    writer.a = writer.weight("a", (8, 4), {"kind": "normal", "mean": 0.0, "std": 0.02}, aliases=("tied",))
    writer.b = writer.weight("b", (8, 4), {"kind": "uniform", "low": -1.0, "high": 1.0})
    writer.norm = writer.weight("norm", (4,), {"kind": "ones"})
    writer.table = writer.constant(torch.arange(6, dtype=torch.int64).reshape(2, 3))
    return writer


def values(writer: Any, trace: Any, tensors: list[int], **options: Any) -> list[torch.Tensor]:
    buffers = [writer.tensors[tensor].buffer for tensor in tensors]
    storages = materialise_weights(trace, buffers, **options)
    return [view_of(storages[buffer], trace.tensors[tensor]) for buffer, tensor in zip(buffers, tensors)]


def test_a_weight_does_not_depend_on_which_others_are_built(model: Any) -> None:
    trace = model.trace()
    a, b, norm, table = values(model, trace, [model.a, model.b, model.norm, model.table])
    assert torch.equal(values(model, trace, [model.b])[0], b)
    assert torch.equal(values(model, trace, [model.b, model.a])[1], a)
    assert not torch.equal(a, b)
    assert torch.equal(norm, torch.ones(4))
    assert table.tolist() == [[0, 1, 2], [3, 4, 5]]


@given(seed=st.integers(0, 2**63), other=st.integers(0, 2**63), name=st.text(min_size=1, max_size=8))
def test_values_follow_seed_and_name(seed: int, other: int, name: str) -> None:
    recipe = {"kind": "normal", "mean": 0.0, "std": 1.0}
    first, again, changed, renamed = (torch.empty(16) for _ in range(4))
    fill(first, name, recipe, seed)
    torch.manual_seed(0)  # nothing may depend on the global generator
    fill(again, name, recipe, seed)
    fill(changed, name, recipe, other)
    fill(renamed, name + "x", recipe, seed)
    assert torch.equal(first, again)
    assert torch.equal(first, changed) == (seed == other)
    assert not torch.equal(first, renamed)


def test_a_module_is_initialised_as_a_run_will_be(model: Any) -> None:
    trace = model.trace()
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.empty(8, 4))
    module.norm = torch.nn.Parameter(torch.empty(4))
    recipes = {weight.name: weight.init for weight in trace.weights if weight.name != "b"}
    initialise_module(module, recipes, trace.info["seed"])
    a, norm = values(model, trace, [model.a, model.norm])
    assert torch.equal(module.a, a)
    assert torch.equal(module.norm, norm)


def test_a_recipe_without_a_weight_is_refused(one_line: Any) -> None:
    with pytest.raises(InputError) as caught:
        initialise_module(torch.nn.Linear(2, 2), {"wieght": {"kind": "ones"}}, 0)
    assert "wieght" in one_line(caught)


@pytest.mark.parametrize(
    "recipe", [{}, {"kind": "pickle"}, {"kind": "normal"}, {"kind": "uniform", "low": "a", "high": 1}]
)
def test_unknown_and_broken_recipes_are_refused(one_line: Any, recipe: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError) as caught:
        fill(torch.empty(4), "w", recipe, 0)
    assert "w:" in one_line(caught)


def test_rotary_frequencies_are_the_usual_ones() -> None:
    found = torch.empty(16)
    fill(found, "f", {"kind": "inverse_frequencies", "theta": 10000.0}, 0)
    assert torch.allclose(found, 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32), rtol=1e-6)


def test_weights_come_from_a_file(model: Any, tmp_path: Path) -> None:
    trace = model.trace()
    given_values = {"tied": torch.randn(8, 4), "b": torch.randn(8, 4), "norm": torch.randn(4)}
    save_file(given_values, tmp_path / "w.safetensors")
    a, norm = values(model, trace, [model.a, model.norm], weights_file=tmp_path / "w.safetensors")
    assert torch.equal(a, given_values["tied"])
    assert torch.equal(norm, given_values["norm"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"b": None}, "lacks weight 'b'"),
        ({"c": torch.zeros(1)}, "'c', which the model lacks"),
        ({"a": torch.zeros(8, 5)}, "float32 [8, 5], the trace has float32 [8, 4]"),
        ({"a": torch.zeros(8, 4, dtype=torch.float16)}, "float16 [8, 4], the trace has float32"),
    ],
)
def test_a_file_of_another_model_is_refused(
    model: Any, tmp_path: Path, one_line: Any, change: dict[str, Any], said: str
) -> None:
    content = {"a": torch.zeros(8, 4), "b": torch.zeros(8, 4), "norm": torch.zeros(4)} | change
    save_file({k: v for k, v in content.items() if v is not None}, tmp_path / "w.safetensors")
    trace = model.trace()
    with pytest.raises(InputError) as caught:
        values(model, trace, [model.a], weights_file=tmp_path / "w.safetensors")
    assert said in one_line(caught)


@pytest.mark.parametrize("content", [None, b"", b"not a safetensors file at all"])
def test_unreadable_weights_files_are_refused(
    model: Any, tmp_path: Path, one_line: Any, content: bytes | None
) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        values(model, model.trace(), [model.a], weights_file=path)
    assert str(path) in one_line(caught)


def test_missing_constants_are_refused(model: Any, one_line: Any) -> None:
    model.constants = {}
    with pytest.raises(ArtifactError) as caught:
        values(model, model.trace(), [model.table])
    assert "constant" in one_line(caught)


def test_fresh_state_follows_its_recipe(writer: Any) -> None:
    filled = writer.state("filled", (2, 3), init={"kind": "full", "value": 2.5})
    trace = writer.trace()
    storages = initial_state(trace, trace.programs[0])
    view = view_of(storages[writer.tensors[filled].buffer], trace.tensors[filled])
    assert view.tolist() == [[2.5] * 3] * 2


def test_a_prompt_depends_on_its_request_alone(writer: Any) -> None:
    table = writer.weight("table", (50, 4), {"kind": "ones"})
    writer.batch = 3
    tokens = writer.input("tokens", (3, 5), "int64")
    result = writer.buffer("output", (3, 5, 4))
    writer.op("aten.embedding.default", [{"tensor": table}, {"tensor": tokens}], [result])
    trace = writer.trace()
    program = trace.programs[0]
    first = random_inputs(trace, program, 1, [10, 11, 12])["tokens"]
    moved = random_inputs(trace, program, 1, [12, 10, 99])["tokens"]
    assert torch.equal(first[2], moved[0])
    assert torch.equal(first[0], moved[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, random_inputs(trace, program, 2, [10, 11, 12])["tokens"])
    assert int(first.min()) >= 0
    assert int(first.max()) < 50
    with pytest.raises(InputError):
        random_inputs(trace, program, 1, [10])


FACTORY = """
import torch

class Model:
    def __init__(self, dtype, seed):
        self.module = torch.nn.Module()
        self.module.a = torch.nn.Parameter(torch.full((2, 2), float(seed), dtype=dtype))

def factory(*, dtype, seed):
    return Model(dtype, seed)
"""


def test_a_factory_is_only_imported_when_trusted_and_unchanged(
    writer: Any, tmp_path: Path, one_line: Any
) -> None:
    import hashlib

    path = tmp_path / "my_model.py"
    path.write_text(FACTORY)
    a = writer.weight("a", (2, 2), {"kind": "factory"})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    writer.info |= {"factory": f"{path}:factory", "factory_hash": digest}
    trace = writer.trace()
    with pytest.raises(TrustError) as caught:
        values(writer, trace, [a])
    assert "--trust-model" in one_line(caught)
    assert values(writer, trace, [a], trusted=True)[0].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    path.write_text(FACTORY + "\nraise SystemExit('must not run')\n")
    with pytest.raises(TrustError) as caught:
        values(writer, trace, [a], trusted=True)
    assert "changed" in one_line(caught)
