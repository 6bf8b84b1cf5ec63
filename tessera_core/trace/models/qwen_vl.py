"""Qwen2.5-VL from the library ``transformers``: prefill reads one image and a text, decode reads tokens.

The image's size is part of the shape, and its features take the prompt's places from the second token on;
so nothing is ever asked of the host. Windows of the vision tower are equal, and run as one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)

from tessera_core.program.ir import State
from tessera_core.trace.models.language import POSITION, is_prefill
from tessera_core.trace.models.library import StateCache
from tessera_core.trace.models.llama import LlamaModel
from tessera_core.trace.models.shapes import VisionLanguageShape
from tessera_core.trace.parallel.plan import ParallelPlan
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError

ROPE_DELTA = "rope_delta"
"""State family: what a request's rotary position is ahead of its place in the cache, int64 (batch, 1)."""

CHANNELS, FRAMES = 3, 2
"""A patch holds the colours of two frames; those of a still image are equal."""


class QwenVisionModel(LlamaModel):
    """``Qwen2_5_VLForConditionalGeneration`` of a given shape."""

    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    shape: VisionLanguageShape

    def __init__(self, shape: VisionLanguageShape, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__(shape, dtype=dtype, seed=seed)
        self.states += (State(name=ROPE_DELTA, batch_axis=0, sequence_axis=None, init={"kind": "zeros"}),)
        self.vision_positions = _patch_positions(shape)
        self.image_positions = _token_positions(shape)
        size = f"{shape.image_columns * shape.patch} x {shape.image_rows * shape.patch} pixels"
        self.notes = (
            f"each request has one image of {size}: tokens 1 to {shape.image_tokens} of its prompt",
            "window attention of the vision tower is one operator over all windows",
        )

    def settings(self, shape: Any) -> dict[str, Any]:
        """See the base class."""
        assert isinstance(shape, VisionLanguageShape)
        text = super().settings(shape)
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": list(shape.rope_sections)}
        return {
            "text_config": text,
            "vision_config": {
                "depth": shape.vision_layers,
                "hidden_size": shape.vision_hidden,
                "intermediate_size": shape.vision_intermediate,
                "num_heads": shape.vision_heads,
                "in_channels": CHANNELS,
                "patch_size": shape.patch,
                "spatial_merge_size": shape.merge,
                "temporal_patch_size": FRAMES,
                "window_size": shape.vision_window,
                "fullatt_block_indexes": list(shape.vision_full_layers),
                "out_hidden_size": shape.hidden,
            },
            "tie_word_embeddings": False,
        }

    def parallel_plan(self) -> ParallelPlan:
        """The language part is shared as any; the vision tower runs whole on every rank."""
        return replace(super().parallel_plan(), notes=("the vision tower is whole on every rank",))

    def adapt(self, module: Any) -> None:
        """See the base class."""
        for block in module.model.visual.blocks:
            block.attn = _VisionAttention(module.model.visual.config)

    def buffer_recipes(self, config: Any) -> dict[str, dict[str, Any]]:
        """See the base class; the tower's frequencies have a base of their own."""
        recipes = super().buffer_recipes(config.text_config)
        tower = {"kind": "inverse_frequencies", "theta": config.vision_config.rope_parameters["rope_theta"]}
        return {name: tower if ".visual." in name else recipe for name, recipe in recipes.items()}

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """See the base class."""
        state = super().make_state(request)
        state[ROPE_DELTA] = torch.zeros(request.batch, 1, dtype=torch.int64)
        return state

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """As for any language model; for prefill also ``pixels``, (batch, patches, elements of a patch).

        Patches come as the library's image processor orders them: those of one token follow each other.
        """
        inputs = super().make_inputs(request)
        if is_prefill(request):
            shape = self.shape
            if request.context < shape.image_tokens + 2:
                raise InputError(
                    f"program {request.name}: an image takes {shape.image_tokens} tokens of the prompt;"
                    f" trace a context of at least {shape.image_tokens + 2}"
                )
            elements = CHANNELS * FRAMES * shape.patch**2
            inputs["pixels"] = torch.zeros(
                request.batch, shape.image_rows * shape.image_columns, elements, dtype=self.dtype
            )
        return inputs

    def mask(self, state: Mapping[str, torch.Tensor], prefill: bool) -> Any:
        """See the base class."""
        return {"full_attention": super().mask(state, prefill)}

    def logits(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], prefill: bool
    ) -> torch.Tensor:
        """See the base class."""
        module: Any = self.module
        hidden = module.model.language_model.embed_tokens(inputs["tokens"])
        batch, tokens, _ = hidden.shape
        if prefill:
            image = self.features(inputs["pixels"])
            hidden = torch.cat([hidden[:, :1], image, hidden[:, 1 + self.shape.image_tokens :]], dim=1)
            text = torch.arange(1 + self.shape.image_tokens, tokens, dtype=torch.int64) + self.delta
            positions = torch.cat([self.image_positions, text.expand(3, -1)], dim=1)
            positions = positions.unsqueeze(1).expand(3, batch, tokens)
            state[ROPE_DELTA].fill_(self.delta)
        else:
            positions = (state[POSITION] + state[ROPE_DELTA]).expand(3, batch, 1)
        result = module.model.language_model(
            attention_mask=self.mask(state, prefill),
            position_ids=positions,
            cache=StateCache(state, self.shape.layers, prefill),
            inputs_embeds=hidden,
            use_cache=True,
        )
        logits: torch.Tensor = module.lm_head(result.last_hidden_state[:, -1])
        return logits

    @property
    def delta(self) -> int:
        """What the rotary position after an image is ahead of the place in the prompt."""
        shape = self.shape
        return max(shape.image_rows, shape.image_columns) // shape.merge - shape.image_tokens

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """The image's features, (batch, image tokens, hidden)."""
        module: Any = self.module
        visual, shape = module.model.visual, self.shape
        batch, patches, _ = pixels.shape
        hidden = visual.patch_embed(pixels.reshape(batch * patches, -1)).view(batch, patches, -1)
        rotary = visual.rotary_pos_emb(hidden, self.vision_positions)
        hidden = self._windows(hidden)
        embeddings = tuple(self._windows(table.unsqueeze(0)).squeeze(0) for table in rotary)
        window = (shape.vision_window // shape.patch) ** 2
        for layer, block in enumerate(visual.blocks):
            length = patches if layer in shape.vision_full_layers else window
            hidden = block(hidden, cu_seqlens=length, position_embeddings=embeddings)
        merged = visual.merger(hidden)
        rows, columns, edge = self._grid()
        merged = merged.view(batch, rows // edge, columns // edge, edge, edge, -1).transpose(2, 3)
        features: torch.Tensor = merged.reshape(batch, rows * columns, -1)
        return features

    def _grid(self) -> tuple[int, int, int]:
        """Rows and columns of tokens in an image, and the edge of a window in tokens."""
        shape = self.shape
        rows, columns = shape.image_rows // shape.merge, shape.image_columns // shape.merge
        edge = shape.vision_window // shape.patch // shape.merge
        assert rows % edge == 0 and columns % edge == 0, "windows of an image are equal"
        return rows, columns, edge

    def _windows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Patches (batch, patches, width) reordered so that those of a window follow each other."""
        rows, columns, edge = self._grid()
        batch, patches, width = hidden.shape
        tokens = hidden.view(batch, rows // edge, edge, columns // edge, edge, -1).transpose(2, 3)
        return tokens.reshape(batch, patches, width)


class _VisionAttention(Qwen2_5_VLVisionAttention):
    """The library's attention over a batch of images; windows of equal length are a batch of their own."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: Any = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``hidden_states`` (batch, patches, hidden); ``cu_seqlens`` patches attend to each other."""
        batch, patches, width = hidden_states.shape
        query, key, value = (
            self.qkv(hidden_states).view(batch, patches, 3, self.num_heads, self.head_dim).unbind(2)
        )
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        query, key, value = (
            part.reshape(-1, cu_seqlens, self.num_heads, self.head_dim).transpose(1, 2)
            for part in (query, key, value)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        result: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, patches, width))
        return result


def _patch_positions(shape: VisionLanguageShape) -> torch.Tensor:
    """Row and column of every patch, int64 (patches, 2), in the image processor's order."""
    rows, columns, merge = shape.image_rows, shape.image_columns, shape.merge
    grid = torch.stack(
        [
            torch.arange(rows).unsqueeze(1).expand(rows, columns),
            torch.arange(columns).unsqueeze(0).expand(rows, columns),
        ]
    )
    grid = grid.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3)
    return grid.reshape(2, rows * columns).t().contiguous()


def _token_positions(shape: VisionLanguageShape) -> torch.Tensor:
    """Time, row and column of the first token and of the image's, int64 (3, 1 + image tokens)."""
    rows, columns = shape.image_rows // shape.merge, shape.image_columns // shape.merge
    image = torch.stack(
        [
            torch.zeros(rows, columns, dtype=torch.int64),
            torch.arange(rows).unsqueeze(1).expand(rows, columns),
            torch.arange(columns).unsqueeze(0).expand(rows, columns),
        ]
    )
    return torch.cat([torch.zeros(3, 1, dtype=torch.int64), 1 + image.reshape(3, -1)], dim=1)
