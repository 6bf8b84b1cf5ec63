"""The catalogue: names, sizes, and models that are built without values."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tessera_core.trace.fake import building, new_fake_mode
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.models import build_model, model_names, model_shape
from tessera_core.trace.models.catalogue import CATALOGUE
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError, ModelError

ROOT = Path(__file__).parents[2]


def test_names_are_distinct_and_found() -> None:
    names = model_names()
    assert len(set(names)) == len(names)
    assert {"llama-3-8b", "llama-tiny", "demo"} <= set(names)
    assert {shape.dtype for shape in CATALOGUE if shape.name.endswith("-tiny")} == {"float32"}
    assert [model_shape(name).name for name in names] == list(names)


def test_a_misspelt_name_gets_a_hint(one_line: Any) -> None:
    with pytest.raises(InputError) as caught:
        build_model("llama-tinny", None, 0)
    assert "did you mean llama-tiny?" in one_line(caught)


def test_listing_names_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tessera_core.trace.models import model_names; model_names();"
        "print(sorted({'torch', 'triton', 'transformers', 'diffusers'} & set(sys.modules)))"
    )
    path = os.pathsep.join(str(ROOT / folder) for folder in ("formats", "."))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, one_line: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tessera_core.trace.models.llama", raising=False)
    with pytest.raises(ModelError) as caught:
        build_model("llama-tiny", None, 0)
    assert "tessera-toolchain[models]" in one_line(caught)


def test_the_eight_billion_parameters_are_all_there_and_cost_nothing() -> None:
    pytest.importorskip("transformers")
    with FakeTensorMode(), torch.no_grad():
        model = build_model("llama-3-8b", None, 0)
        assert isinstance(model, TraceableModel)
        assert sum(parameter.numel() for parameter in model.module.parameters()) == 8_030_261_248
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
        assert all(isinstance(parameter, FakeTensor) for parameter in model.module.parameters())
        for request, tokens in (
            (ProgramRequest("prefill", 1, 128), 128),
            (ProgramRequest("decode", 64, 1024), 1),
        ):
            inputs, state = model.make_inputs(request), model.make_state(request)
            assert inputs["tokens"].shape == (request.batch, tokens)
            assert state["layers.31.value"].shape == (request.batch, 8, request.context, 128)
            outputs = model.step(request, inputs, state)
            assert outputs["logits"].shape == (request.batch, 128256)
            assert outputs["next_token"].shape == (request.batch, 1)
            assert outputs["next_token"].dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published with the weights
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-32b", 32_763_876_352),
        ("gpt-oss-20b", 20_914_757_184),
        ("qwen3-235b", 235_093_634_560),
        (
            "deepseek-v3",
            671_026_404_352,
        ),  # without the router's 58 x 256 corrections, which are no parameters here
        ("mamba-codestral-7b", 7_285_403_648),
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("stable-diffusion-3.5-medium", 2_243_171_520),
    ],
)
def test_real_sizes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    pytest.importorskip("diffusers" if "diffusion" in name else "transformers")
    with building(new_fake_mode()):
        model = build_model(name, None, 0)
    assert sum(parameter.numel() for parameter in model.module.parameters()) == parameters
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_llama_gives_what_the_library_gives_without_a_cache() -> None:
    """Our cache, mask and attention against the library's own eager attention over the whole sequence."""
    pytest.importorskip("transformers")
    model = build_model("llama-tiny", None, 0)
    tokens = torch.randint(0, model.shape.vocabulary, (2, 20), generator=torch.Generator().manual_seed(1))
    prefill, decode = ProgramRequest("prefill", 2, 16), ProgramRequest("decode", 2, 32)
    first, state = model.make_state(prefill), model.make_state(decode)
    logits = [model.step(prefill, {"tokens": tokens[:, :16]}, first)["logits"]]
    for name, value in first.items():
        state[name].copy_(value) if name == "position" else state[name][:, :, :16].copy_(value)
    for index in range(16, 20):
        logits.append(model.step(decode, {"tokens": tokens[:, index : index + 1]}, state)["logits"])
    model.module.set_attn_implementation("eager")
    expected = model.module(tokens, use_cache=False).logits[:, 15:20]
    assert torch.allclose(torch.stack(logits, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["llama-tiny", "gpt-oss-tiny", "mamba-codestral-tiny", "stable-diffusion-3.5-tiny", "demo"]
)
def test_weights_follow_the_seed(name: str) -> None:
    pytest.importorskip({"d": "triton", "s": "diffusers"}.get(name[0], "transformers"))
    first, again, other = (
        dict(build_model(name, None, seed).module.named_parameters()) for seed in (1, 1, 2)
    )
    fixed = ("norm", ".D")
    random = [weight for weight in first if not any(part in weight for part in fixed) or "linear" in weight]
    assert all(torch.equal(first[weight], again[weight]) for weight in first)
    assert not any(torch.equal(first[weight], other[weight]) for weight in random)


def test_other_phases_are_refused(one_line: Any) -> None:
    pytest.importorskip("triton")
    model = build_model("demo", None, 0)
    with pytest.raises(InputError) as caught:
        model.make_inputs(ProgramRequest("train", 1, 16))
    assert "prefill and decode" in one_line(caught)
