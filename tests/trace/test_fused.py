"""Fused operators keep what their schemas and shapes promise, and the one-token forms go on from the prompt's."""

from typing import Any

import pytest
import torch

from tessera_core.program.operators import resolve_operator
from tessera_core.trace.fused import operators
from tessera_core.trace.fused.table import FUSED

B, T, H, G, W, N, K = 2, 5, 4, 2, 8, 6, 4


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def arguments(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """One call of every operator; several tensors are views that are not contiguous."""

    def d(*shape: int) -> torch.Tensor:
        return draw(*shape, dtype=dtype)

    heads = (d(H), d(B, T, G, N), d(B, T, G, N), d(H), d(H))
    one = (d(H), d(B, G, N), d(B, G, N), d(H), d(H))
    chosen, weights = torch.tensor([[0, 2], [2, 1], [2, 0]]), d(3, 2).softmax(-1)
    prompt = (d(B, T, H, W).transpose(1, 2), d(B, G, T, W), d(B, G, T, W))
    position = torch.tensor([3])
    return {
        "sink_attention": (*prompt, d(H), None, 0.3, 2),
        "latent_attention": (d(B, H, W), d(B, T, W), position, 0.3, 6),
        "clamped_experts": (
            *(d(3, W), chosen, weights),
            *(d(3, W, 2 * N), d(3, 2 * N), d(3, N, W), d(3, W), 1.7, 0.5),
        ),
        "clamped_experts_part": (
            *(d(3, W), chosen, weights),
            *(d(3, W, 2 * N), d(3, 2 * N), d(3, N, W), 1.7, 0.5),
        ),
        "gated_experts": (d(3, W), chosen, weights, d(3, 2 * N, W), d(3, W, N)),
        "causal_convolution": (d(B, T, 2 * W)[..., ::2], d(W, K), d(W), d(B, W, K - 1)),
        "causal_convolution_step": (d(B, 2 * W)[..., ::2], d(W, K), d(W), d(B, W, K - 1)),
        "selective_scan": (d(B, T, H, W), d(B, T, H), *heads, d(B, H, W, N), 3),
        "selective_step": (d(B, H, W), d(B, H), *one, d(B, H, W, N)),
        "vocabulary_rows": (torch.tensor([[0, 7], [3, 9]]), d(4, 2 * W)[:, ::2], 3, 12),
        "all_reduce": (d(B, 2 * W)[..., ::2], 2),
        "all_gather": (d(B, 2 * W)[..., ::2], [3, W], 1),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FUSED))
def test_an_operator_keeps_its_schema(name: str, dtype: torch.dtype) -> None:
    overload = resolve_operator(f"tessera.{name}.default")
    torch.library.opcheck(overload, arguments(dtype)[name], test_utils=("test_schema", "test_faketensor"))


def test_a_window_of_sinks_is_softmax_over_its_rows() -> None:
    query, key, value, sinks, _, scale, window = arguments(torch.float32)["sink_attention"]
    found = operators.sink_attention(query, key, value, sinks, None, scale, window)
    for row in range(T):
        seen = slice(max(0, row - window + 1), row + 1)
        for head in range(H):
            scores = key[:, head // 2, seen] @ query[:, head, row, :, None] * scale
            weights = torch.cat([scores[..., 0], sinks[head].expand(B, 1)], dim=1).softmax(-1)[:, :-1]
            expected = (weights[..., None] * value[:, head // 2, seen]).sum(1)
            assert torch.allclose(found[:, row, head], expected, atol=1e-6)
        position = torch.tensor([row])
        alone = operators.sink_attention(
            query[:, :, row : row + 1], key, value, sinks, position, scale, window
        )
        assert torch.allclose(alone[:, 0], found[:, row], atol=1e-6)


def test_steps_go_on_from_a_scan() -> None:
    """A prompt at once, and its last token as a step after the others, leave the same state and output."""
    source, step, decay, enter, leave, skip, bias, state, chunk = arguments(torch.float32)["selective_scan"]
    parts, first = state.clone(), T - 1
    whole = operators.selective_scan(source, step, decay, enter, leave, skip, bias, state, chunk)
    operators.selective_scan(
        source[:, :first],
        step[:, :first],
        decay,
        enter[:, :first],
        leave[:, :first],
        skip,
        bias,
        parts,
        chunk,
    )
    last = operators.selective_step(
        source[:, first], step[:, first], decay, enter[:, first], leave[:, first], skip, bias, parts
    )
    assert torch.equal(last, whole[:, first]) and torch.equal(parts, state)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_steps_go_on_from_a_convolution(tokens: int) -> None:
    _, weight, bias, state = arguments(torch.float32)["causal_convolution"]
    source = draw(B, tokens + 1, W)
    parts = state.clone()
    whole = operators.causal_convolution(source, weight, bias, state)
    operators.causal_convolution(source[:, :tokens], weight, bias, parts)
    last = operators.causal_convolution_step(source[:, tokens], weight, bias, parts)
    assert torch.allclose(last, whole[:, tokens], atol=1e-6) and torch.equal(parts, state)
