"""Stable Diffusion 3.5's transformer from the library ``diffusers``: one denoising step per iteration.

A program's phase is ``step`` and its context the edge of the latents (an image of 1024 x 1024 pixels has
latents of 128 x 128). The step ends with the scheduler's update, so that its result is the next step's
input; a request with classifier-free guidance takes two rows of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SD3Transformer2DModel

from tessera_core.program.ir import Guard, State
from tessera_core.program.weights import initialise_module
from tessera_core.trace.models.library import materialise, recipe_for
from tessera_core.trace.models.shapes import DiffusionShape
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError


class DiffusionModel:
    """``SD3Transformer2DModel`` of a given shape; nothing lives across iterations but the latents."""

    def __init__(self, shape: DiffusionShape, *, dtype: torch.dtype, seed: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.states: tuple[State, ...] = ()
        self.feeds: Mapping[str, str] = {"latents": "latents"}
        width = shape.heads * shape.head_width
        with torch.device("meta"):
            module: Any = SD3Transformer2DModel(
                sample_size=shape.sample,
                patch_size=shape.patch,
                in_channels=shape.channels,
                out_channels=shape.channels,
                num_layers=shape.layers,
                attention_head_dim=shape.head_width,
                num_attention_heads=shape.heads,
                joint_attention_dim=shape.text_width,
                caption_projection_dim=width,
                pooled_projection_dim=shape.pooled_width,
                pos_embed_max_size=shape.positions,
                dual_attention_layers=tuple(range(shape.dual_layers)),
                qk_norm="rms_norm",
            )
        materialise(module, dtype)
        self.module: torch.nn.Module = module.eval()
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        self.recipes: Mapping[str, dict[str, Any]] | None = {
            name: _recipe(name, tensor) for name, tensor in tensors
        }
        initialise_module(self.module, self.recipes, seed)
        self.notes = (
            "context is the edge of the latents; a step ends with the Euler update of the latents",
            "the table of position embeddings holds random values like any other weight",
        )

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """``latents`` (batch, channels, edge, edge), ``text`` (batch, text tokens, text width), ``pooled``
        (batch, pooled width), and in float32 ``timestep`` (batch,) and ``step_size`` (batch,), the difference
        of the scheduler's next and present noise levels.
        """
        shape, batch, edge = self.shape, request.batch, request.context
        if request.phase != "step":
            raise InputError(f"program {request.name}: a diffusion model has phase step")
        if edge % shape.patch or edge // shape.patch > shape.positions:
            raise InputError(
                f"program {request.name}: context is the edge of the latents; make it a multiple of"
                f" {shape.patch} up to {shape.patch * shape.positions}"
            )
        return {
            "latents": torch.zeros(batch, shape.channels, edge, edge, dtype=self.dtype),
            "text": torch.zeros(batch, shape.text_tokens, shape.text_width, dtype=self.dtype),
            "pooled": torch.zeros(batch, shape.pooled_width, dtype=self.dtype),
            "timestep": torch.zeros(batch),
            "step_size": torch.zeros(batch),
        }

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One step; returns ``velocity``, the transformer's prediction, and the new ``latents``."""
        (velocity,) = self.module(
            inputs["latents"],
            encoder_hidden_states=inputs["text"],
            pooled_projections=inputs["pooled"],
            timestep=inputs["timestep"],
            return_dict=False,
        )
        size = inputs["step_size"].view(-1, 1, 1, 1)
        latents = (inputs["latents"].float() + size * velocity.float()).to(self.dtype)
        return {"velocity": velocity, "latents": latents}

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """None: an image's size is the program's."""
        return ()


def _recipe(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Weights that keep the size of what flows through them; small biases."""
    if name == "pos_embed.pos_embed" or tensor.dim() < 2:
        return recipe_for(name, 0.02 if tensor.dim() < 2 else 0.5)
    return recipe_for(name.replace("norm", ""), tensor[0].numel() ** -0.5)
