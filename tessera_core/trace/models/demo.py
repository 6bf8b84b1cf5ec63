"""The embedded demo model: a small Llama block stack whose normalisation, rotary embedding and gate are
hand-written Triton kernels, launched as users launch theirs, so that real PTX flows through every stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tessera_core.program.weights import initialise_module
from tessera_core.trace.models.demo_kernels import rms_norm_kernel, rotary_kernel, silu_multiply_kernel
from tessera_core.trace.models.language import POSITION, LanguageModel, append, attention, decode_mask
from tessera_core.trace.models.shapes import DemoShape

SILU_BLOCK = 256
"""Elements that one block of the gate's kernel computes."""


class DemoModel(LanguageModel):
    """The demo model of a given shape; matrices are normal with deviation 0.05, gains are ones."""

    def __init__(self, shape: DemoShape, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__(shape, dtype=dtype)
        self.stack = _Stack(shape, dtype)
        self.module = self.stack.eval().requires_grad_(False)
        self.recipes = {
            name: {"kind": "ones"} if "norm" in name else {"kind": "normal", "mean": 0.0, "std": 0.05}
            for name, _ in self.module.named_parameters()
        }
        self.recipes["frequencies"] = {"kind": "inverse_frequencies", "theta": shape.rope_theta}
        initialise_module(self.module, self.recipes, seed)

    def logits(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], prefill: bool
    ) -> torch.Tensor:
        """See the base class."""
        return self.stack(inputs["tokens"], state, prefill)  # type: ignore[no-any-return]


class _Stack(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, shape: DemoShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden, dtype=dtype))
        self.blocks = nn.ModuleList(_Block(shape, layer, dtype) for layer in range(shape.layers))
        self.norm = nn.Parameter(torch.empty(shape.hidden, dtype=dtype))
        self.head = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden, dtype=dtype))
        self.frequencies = nn.Buffer(torch.empty(shape.head_width // 2))
        self.epsilon = shape.norm_epsilon

    def forward(self, tokens: torch.Tensor, state: Mapping[str, torch.Tensor], prefill: bool) -> torch.Tensor:
        """Logits of the last token."""
        hidden = nn.functional.embedding(tokens, self.embedding)
        if prefill:
            positions, mask = torch.arange(tokens.shape[1], dtype=torch.int64), None
        else:
            positions, mask = state[POSITION], decode_mask(state, hidden.dtype)
        angles = positions.unsqueeze(1) * self.frequencies
        cosines, sines = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, cosines, sines, mask, state, prefill)
        last = rms_norm(hidden[:, -1].contiguous(), self.norm, self.epsilon)
        return nn.functional.linear(last, self.head)


class _Block(nn.Module):
    """Attention and gated feed-forward, each behind a norm and added to what it read."""

    def __init__(self, shape: DemoShape, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width, inner = shape.hidden, shape.head_width, shape.intermediate

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, dtype=dtype))

        self.shape, self.layer = shape, layer
        self.attention_norm = nn.Parameter(torch.empty(hidden, dtype=dtype))
        self.query = matrix(shape.heads * width, hidden)
        self.key = matrix(shape.key_heads * width, hidden)
        self.value = matrix(shape.key_heads * width, hidden)
        self.output = matrix(hidden, shape.heads * width)
        self.feed_forward_norm = nn.Parameter(torch.empty(hidden, dtype=dtype))
        self.gate = matrix(inner, hidden)
        self.up = matrix(inner, hidden)
        self.down = matrix(hidden, inner)

    def forward(
        self,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        mask: torch.Tensor | None,
        state: Mapping[str, torch.Tensor],
        prefill: bool,
    ) -> torch.Tensor:
        """``hidden`` (batch, tokens, hidden) after this block."""
        linear, shape = nn.functional.linear, self.shape
        batch, tokens, _ = hidden.shape
        normed = rms_norm(hidden, self.attention_norm, shape.norm_epsilon)
        query = linear(normed, self.query).view(batch, tokens, shape.heads, shape.head_width)
        key = linear(normed, self.key).view(batch, tokens, shape.key_heads, shape.head_width)
        value = linear(normed, self.value).view(batch, tokens, shape.key_heads, shape.head_width)
        keys, values = append(state, self.layer, rotary(key, cosines, sines), value.transpose(1, 2), prefill)
        mixed = attention(rotary(query, cosines, sines), keys, values, mask)
        hidden = hidden + linear(mixed.transpose(1, 2).reshape(batch, tokens, -1), self.output)
        normed = rms_norm(hidden, self.feed_forward_norm, shape.norm_epsilon)
        gated = silu_multiply(linear(normed, self.gate), linear(normed, self.up))
        return hidden + linear(gated, self.down)


def rms_norm(source: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last axis of a contiguous tensor."""
    result = torch.empty_like(source)
    columns = source.shape[-1]
    block = 1 << (columns - 1).bit_length()
    rms_norm_kernel[(source.numel() // columns,)](source, weight, result, columns, epsilon, BLOCK=block)
    return result


def rotary(source: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding; (batch, tokens, heads, width) becomes (batch, heads, tokens, width)."""
    batch, tokens, heads, width = source.shape
    result = source.new_empty(batch, heads, tokens, width)
    rotary_kernel[(heads, tokens, batch)](source, cosines, sines, result, tokens, heads, HALF=width // 2)
    return result


def silu_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of two contiguous tensors."""
    result = torch.empty_like(gate)
    elements = gate.numel()
    grid = (-(-elements // SILU_BLOCK),)
    silu_multiply_kernel[grid](gate, up, result, elements, BLOCK=SILU_BLOCK)
    return result
