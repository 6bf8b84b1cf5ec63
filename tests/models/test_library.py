"""Models with fused operators against the library's own eager code, over a whole sequence without a cache."""

from typing import Any

import pytest
import torch

from tessera_core.trace.models import build_model
from tessera_core.trace.request import ProgramRequest

PREFILL, DECODE = ProgramRequest("prefill", 2, 16), ProgramRequest("decode", 2, 32)
TOKENS = 20


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a prefill's state into the first rows of a decode's."""
    target[tuple(slice(0, extent) for extent in source.shape)] = source


@torch.no_grad()
def step_by_step(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the prompt's last token and of each further one, (batch, steps, vocabulary)."""
    tokens = inputs["tokens"]
    first, state = model.make_state(PREFILL), model.make_state(DECODE)
    logits = [model.step(PREFILL, {**inputs, "tokens": tokens[:, : PREFILL.context]}, first)["logits"]]
    for name, value in first.items():
        move(value, state[name])
    for index in range(PREFILL.context, TOKENS):
        logits.append(model.step(DECODE, {"tokens": tokens[:, index : index + 1]}, state)["logits"])
    return torch.stack(logits, dim=1)


def tokens_for(model: Any) -> torch.Tensor:
    return torch.randint(0, model.shape.vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_gpt_oss_computes_what_the_library_computes() -> None:
    pytest.importorskip("transformers")
    model: Any = build_model("gpt-oss-tiny", None, 0)
    tokens = tokens_for(model)
    found = step_by_step(model, {"tokens": tokens})
    model.module.set_attn_implementation("eager")
    model.module.set_experts_implementation("eager")
    expected = model.module(tokens, use_cache=False).logits[:, PREFILL.context - 1 :]
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_mamba_computes_what_the_library_computes() -> None:
    transformers = pytest.importorskip("transformers")
    model: Any = build_model("mamba-codestral-tiny", None, 0)
    tokens = tokens_for(model)
    library = transformers.Mamba2ForCausalLM(model.module.config).eval()
    library.load_state_dict(model.module.state_dict())
    expected = library(tokens, use_cache=False).logits[:, PREFILL.context - 1 :]
    assert torch.allclose(step_by_step(model, {"tokens": tokens}), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_qwen_vl_computes_what_the_library_computes() -> None:
    transformers = pytest.importorskip("transformers")
    model: Any = build_model("qwen2.5-vl-tiny", None, 0)
    shape, config = model.shape, model.module.config
    inputs = model.make_inputs(PREFILL)
    pixels = torch.randn(inputs["pixels"].shape, generator=torch.Generator().manual_seed(2))
    tokens = tokens_for(model)
    found = step_by_step(model, {"tokens": tokens, "pixels": pixels})
    config.image_token_id, config.video_token_id = shape.vocabulary - 1, shape.vocabulary - 2
    config._attn_implementation = "eager"
    library = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    library.load_state_dict(model.module.state_dict(), strict=False)
    for name, buffer in library.named_buffers():
        buffer.copy_(dict(model.module.named_buffers())[name])
    image = slice(1, 1 + shape.image_tokens)
    tokens = tokens.clamp(max=shape.vocabulary - 3)
    tokens[:, image] = config.image_token_id
    kinds = torch.zeros_like(tokens)
    kinds[:, image] = 1
    expected = library(
        tokens,
        pixel_values=pixels.flatten(0, 1),
        image_grid_thw=torch.tensor([[1, shape.image_rows, shape.image_columns]] * 2),
        mm_token_type_ids=kinds,
        use_cache=False,
    ).logits[:, PREFILL.context - 1 :]
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "library"),
    [("qwen3-tiny", "Qwen3MoeForCausalLM"), ("deepseek-tiny", "DeepseekV3ForCausalLM")],
)
def test_other_mixtures_compute_what_the_library_computes(name: str, library: str) -> None:
    transformers = pytest.importorskip("transformers")
    model: Any = build_model(name, None, 0)
    tokens = tokens_for(model)
    found = step_by_step(model, {"tokens": tokens})
    config = model.module.config
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    eager = getattr(transformers, library)(config).eval()
    eager.load_state_dict(model.module.state_dict(), strict=False)
    expected = eager(tokens, use_cache=False).logits[:, PREFILL.context - 1 :]
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)
