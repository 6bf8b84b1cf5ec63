"""Mamba-2 from the library ``transformers``; convolution and scan are fused operators in both phases.

The library would scan in chunks by dozens of eager operators in prefill, and repeat its input and output
matrices for every head in decode; serving runs one operator for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from tessera_core.program.ir import State
from tessera_core.program.weights import initialise_module
from tessera_core.trace.fused.operators import (
    causal_convolution,
    causal_convolution_step,
    selective_scan,
    selective_step,
)
from tessera_core.trace.models.language import TokenModel
from tessera_core.trace.models.library import materialise, recipe_for
from tessera_core.trace.models.shapes import MambaShape
from tessera_core.trace.parallel.plan import Count, Join, Lookup, ParallelPlan, Split
from tessera_core.trace.parallel.shares import Dimension
from tessera_core.trace.request import ProgramRequest

# The library draws time steps log-uniformly from 0.001 to 0.1; softplus of a bias from here gives nearly that.
_STEP_BIAS = {"kind": "uniform", "low": -6.9, "high": -2.25}


class MambaModel(TokenModel):
    """``Mamba2ForCausalLM`` of a given shape; prefill scans the prompt, decode is one step of the recurrence."""

    shape: MambaShape

    def __init__(self, shape: MambaShape, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__(shape, dtype=dtype)
        zeros = {"kind": "zeros"}
        self.states = tuple(
            State(name=name, batch_axis=0, sequence_axis=None, init=zeros)
            for layer in range(shape.layers)
            for name in _state_names(layer)
        )
        config = Mamba2Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_heads=shape.heads,
            head_dim=shape.head_width,
            expand=shape.heads * shape.head_width // shape.hidden,
            n_groups=shape.groups,
            state_size=shape.state,
            conv_kernel=shape.kernel,
            chunk_size=shape.chunk,
            layer_norm_epsilon=shape.norm_epsilon,
            tie_word_embeddings=False,
        )
        with torch.device("meta"):
            module = Mamba2ForCausalLM(config)
            for layer, block in enumerate(module.backbone.layers):
                block.mixer = _Mixer(config, layer)
        materialise(module, dtype)
        self.module = module.eval()
        self.recipes = {name: _recipe(name, shape) for name, _ in self.module.named_parameters()}
        initialise_module(self.module, self.recipes, seed)
        name = str(dtype).removeprefix("torch.")
        self.notes = (
            "convolution and selective scan are fused operators (tessera::causal_convolution, tessera::selective_scan);"
            " decode runs their one-token forms",
            "on CUDA they are Triton kernels of this package (tessera_core.trace.fused.kernels)",
            f"conv_state and ssm_state are {name}, the recurrence is computed in float32",
        )

    def parallel_plan(self) -> ParallelPlan:
        """Shared by groups, whose heads share input and output matrices and are normed together."""
        shape, mixer = self.shape, "backbone.layers.*.mixer"
        groups = Dimension(name="groups of heads", extent=shape.groups, exact=True)
        vocabulary = Dimension(name="vocabulary", extent=shape.vocabulary)
        inner, states = shape.heads * shape.head_width, shape.groups * shape.state
        mixed = (inner, states, states)

        def cut(name: str, axis: int = 0, sections: tuple[int, ...] = ()) -> Split:
            return Split(tensor=f"{mixer}.{name}", axis=axis, dimension=groups.name, sections=sections)

        return ParallelPlan(
            dimensions=(groups, vocabulary),
            splits=(
                cut("in_proj.weight", sections=(inner, *mixed, shape.heads)),
                *(cut(f"conv1d.{name}", sections=mixed) for name in ("weight", "bias")),
                *(cut(name) for name in ("A_log", "D", "dt_bias", "norm.weight")),
                cut("out_proj.weight", axis=1),
                Split(tensor="lm_head.weight", axis=0, dimension=vocabulary.name),
            ),
            joins=(
                Join(module=f"{mixer}.out_proj", how="all_reduce"),
                Join(module="lm_head", how="all_gather", dimension=vocabulary.name),
            ),
            lookups=(Lookup(module="backbone.embeddings", dimension=vocabulary.name),),
            states=(
                Split(tensor="layers.*.conv_state", axis=1, dimension=groups.name, sections=mixed),
                Split(tensor="layers.*.ssm_state", axis=1, dimension=groups.name, sections=(shape.heads,)),
            ),
            counts=tuple(
                Count(module=mixer, attribute=name, dimension=groups.name)
                for name in ("num_heads", "n_groups")
            ),
        )

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Zeros: the last inputs of the convolution (batch, channels, kernel - 1), and the recurrent state
        (batch, heads, head width, state) of each layer; their size does not depend on the context.
        """
        shape, state = self.shape, {}
        channels = shape.heads * shape.head_width + 2 * shape.groups * shape.state
        for layer in range(shape.layers):
            convolution, recurrence = _state_names(layer)
            state[convolution] = torch.zeros(request.batch, channels, shape.kernel - 1, dtype=self.dtype)
            state[recurrence] = torch.zeros(
                request.batch, shape.heads, shape.head_width, shape.state, dtype=self.dtype
            )
        return state

    def logits(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], prefill: bool
    ) -> torch.Tensor:
        """See the base class."""
        module: Any = self.module
        hidden = module.backbone.embeddings(inputs["tokens"])
        for layer, block in enumerate(module.backbone.layers):
            convolution, recurrence = (state[name] for name in _state_names(layer))
            hidden = block(hidden, cache=_LayerState(convolution, recurrence, prefill))
        last = module.backbone.norm_f(hidden[:, -1])
        logits: torch.Tensor = module.lm_head(last.to(module.lm_head.weight.dtype))
        return logits


@dataclass(frozen=True, slots=True)
class _LayerState:
    """What one layer keeps between iterations."""

    convolution: torch.Tensor
    recurrence: torch.Tensor
    prefill: bool


class _Mixer(Mamba2Mixer):
    """The library's mixer with fused operators in the place of its own functions."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        """``hidden_states`` (batch, tokens, hidden), mixed along the tokens; updates ``cache``."""
        assert isinstance(cache, _LayerState)
        batch, tokens, _ = hidden_states.shape
        inner, states = self.num_heads * self.head_dim, self.n_groups * self.ssm_state_size
        gate, mixed, step = self.in_proj(hidden_states).split(
            [inner, inner + 2 * states, self.num_heads], dim=-1
        )
        weight = self.conv1d.weight.squeeze(1)
        if cache.prefill:
            mixed = causal_convolution(mixed, weight, self.conv1d.bias, cache.convolution)
        else:
            mixed, step = mixed.squeeze(1), step.squeeze(1)
            mixed = causal_convolution_step(mixed, weight, self.conv1d.bias, cache.convolution)
        source, enter, leave = mixed.split([inner, states, states], dim=-1)
        outer = mixed.shape[:-1]
        arguments = (
            source.view(*outer, self.num_heads, self.head_dim),
            step,
            self.A_log,
            enter.view(*outer, self.n_groups, self.ssm_state_size),
            leave.view(*outer, self.n_groups, self.ssm_state_size),
            self.D,
            self.dt_bias,
            cache.recurrence,
        )
        if cache.prefill:
            scanned = selective_scan(*arguments, self.chunk_size)
        else:
            scanned = selective_step(*arguments)
        normed = self.norm(scanned.reshape(batch, tokens, inner), gate)
        result: torch.Tensor = self.out_proj(normed.to(hidden_states.dtype))
        return result


def _state_names(layer: int) -> tuple[str, str]:
    """State families of a layer."""
    return f"layers.{layer}.conv_state", f"layers.{layer}.ssm_state"


def _recipe(name: str, shape: MambaShape) -> dict[str, Any]:
    match name.rpartition(".")[2]:
        case "A_log":
            return {"kind": "uniform", "low": 0.0, "high": math.log(shape.heads)}
        case "dt_bias":
            return _STEP_BIAS
        case "D":
            return {"kind": "ones"}
    if ".conv1d." in name:
        bound = shape.kernel**-0.5
        return {"kind": "uniform", "low": -bound, "high": bound}
    return recipe_for(name, shape.hidden**-0.5)
