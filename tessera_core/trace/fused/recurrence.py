"""Mamba-2's two recurrences, over a prompt and for one token: the short convolution and the selective scan.

The prompt's forms leave the state that the one-token forms go on from. Arithmetic is float32; on a CPU the
scan goes token by token with the one-token form's arithmetic, where a GPU would work in chunks.
"""

from __future__ import annotations

import torch

from tessera_core.trace.fused.kernels import on_cuda


@torch.library.custom_op("tessera::causal_convolution", mutates_args=("state",))
def causal_convolution(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Depthwise convolution of a prompt with what came before each token, then SiLU.

    ``source`` (batch, tokens, channels), ``weight`` (channels, kernel), ``bias`` (channels,). ``state``
    (batch, channels, kernel - 1) becomes the last tokens of ``source``, zeros before the prompt's start.
    """
    kernel = weight.shape[1]
    padded = torch.nn.functional.pad(source.transpose(1, 2).float(), (kernel - 1, 0))
    state.copy_(padded[:, :, padded.shape[2] - kernel + 1 :])
    windows = padded.unfold(2, kernel, 1)
    mixed = (windows * weight.float().unsqueeze(1)).sum(dim=-1) + bias.float().unsqueeze(1)
    result = source.new_empty(source.shape)
    return result.copy_(torch.nn.functional.silu(mixed).transpose(1, 2))


@causal_convolution.register_fake
def _(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return source.new_empty(source.shape)


@torch.library.custom_op("tessera::causal_convolution_step", mutates_args=("state",))
def causal_convolution_step(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """:func:`causal_convolution` for one more token: ``source`` (batch, channels); ``state`` moves on by one."""
    window = torch.cat([state, source.unsqueeze(2).to(state.dtype)], dim=2)
    state.copy_(window[:, :, 1:])
    mixed = (window.float() * weight.float()).sum(dim=-1) + bias.float()
    return torch.nn.functional.silu(mixed).to(source.dtype)


@causal_convolution_step.register_fake
def _(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return source.new_empty(source.shape)


@torch.library.custom_op("tessera::selective_scan", mutates_args=("state",))
def selective_scan(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """Mamba-2's state space duality over a prompt (arXiv 2405.21060), from an empty state.

    ``source`` (batch, tokens, heads, width); ``step`` (batch, tokens, heads), made positive by softplus after
    ``step_bias`` (heads,); ``decay`` (heads,), the logarithm of A; ``enter`` and ``leave``, B and C, (batch,
    tokens, groups, state); ``skip``, D, (heads,). ``state`` (batch, heads, width, state) becomes the state
    after the last token. ``chunk``: tokens that a GPU scans at once; the result does not depend on it.
    Returns like ``source``, contiguous.
    """
    current = torch.zeros(state.shape, dtype=torch.float32, device=state.device)
    result = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    for token in range(source.shape[1]):
        result[:, token] = _advance(
            source[:, token],
            step[:, token],
            decay,
            enter[:, token],
            leave[:, token],
            skip,
            step_bias,
            current,
        )
    state.copy_(current)
    return result


@selective_scan.register_fake
def _(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    return source.new_empty(source.shape)


@torch.library.custom_op("tessera::selective_step", mutates_args=("state",))
def selective_step(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """:func:`selective_scan` for one more token: all without the axis of tokens; ``state`` is updated."""
    current = state.float()
    if current is state:
        current = current.clone()
    result = _advance(source, step, decay, enter, leave, skip, step_bias, current)
    state.copy_(current)
    return result


@selective_step.register_fake
def _(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    return source.new_empty(source.shape)


def _advance(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    current: torch.Tensor,
) -> torch.Tensor:
    """One token: updates the float32 state ``current`` in place, returns the output in ``source``'s dtype."""
    shared = source.shape[1] // enter.shape[1]
    widths = torch.nn.functional.softplus(step.float() + step_bias.float())
    kept = torch.exp(-widths * torch.exp(decay.float()))
    entering = enter.float().repeat_interleave(shared, dim=1)
    leaving = leave.float().repeat_interleave(shared, dim=1)
    values = source.float()
    current.mul_(kept[..., None, None])
    current.add_((widths[..., None] * values)[..., None] * entering[:, :, None, :])
    mixed = (current * leaving[:, :, None, :]).sum(dim=-1) + skip.float()[:, None] * values
    return mixed.to(source.dtype)


on_cuda(causal_convolution, "convolution", "causal_convolution")
on_cuda(causal_convolution_step, "convolution", "causal_convolution_step")
on_cuda(selective_scan, "recurrence", "selective_scan")
on_cuda(selective_step, "recurrence", "selective_step")
