"""What the sizes of a catalogued model are called, family by family; no library is needed to read them.

Each family names the class that builds it, so that a model library is loaded only when one of its models is.
Widths count elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A catalogued model.

    ``source``: ``catalogue`` (a model library defines the layers) or ``embedded`` (this package does).
    ``dtype``: of the weights unless the user asks for another. ``builder``: MODULE:CLASS that makes a
    :class:`~tessera_core.trace.model.TraceableModel` of the shape.
    """

    name: str
    summary: str
    source: Literal["catalogue", "embedded"]
    dtype: str
    builder: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShape(Shape):
    """A model that reads and writes tokens."""

    layers: int
    hidden: int
    vocabulary: int
    norm_epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape(TokenShape):
    """A decoder-only transformer with grouped-query attention, RMSNorm, rotary embedding and gated SiLU."""

    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    rope_theta: float
    positions: int


class LlamaShape(DecoderShape):
    """Llama: a decoder without biases."""

    builder = "tessera_core.trace.models.llama:LlamaModel"


class DemoShape(DecoderShape):
    """Llama's structure with hand-written Triton kernels."""

    builder = "tessera_core.trace.models.demo:DemoModel"


class QwenShape(DecoderShape):
    """Qwen2.5: a decoder with biases on queries, keys and values."""

    builder = "tessera_core.trace.models.llama:QwenModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape(DecoderShape):
    """A decoder whose feed-forward layers are mixtures of experts; ``intermediate`` is one expert's width."""

    experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssShape(MixtureShape):
    """gpt-oss: attention sinks, every other layer attends to a window of ``window`` tokens; YaRN positions.

    ``rope_factor`` stretches the ``rope_positions`` that the rotary embedding was made for.
    """

    builder = "tessera_core.trace.models.gpt_oss:GptOssModel"
    window: int
    rope_factor: float
    rope_positions: int


class QwenMixtureShape(MixtureShape):
    """Qwen3's mixtures of experts: norms on queries and keys, no biases."""

    builder = "tessera_core.trace.models.mixtures:QwenMixtureModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekShape(MixtureShape):
    """DeepSeek-V3: latent attention, and a shared expert beside routed ones.

    The first ``dense_layers`` have no experts, but one feed-forward of ``dense_intermediate``. The router
    chooses among the ``groups_per_token`` best of ``expert_groups``, and scales their weights by
    ``routed_scale``. A query passes through ``query_rank`` channels; a cache row holds ``latent_rank``
    channels and ``rotary_width`` rotary ones for all heads, whose keys have ``head_width`` channels of their
    own and values ``value_width``.
    """

    builder = "tessera_core.trace.models.deepseek:DeepSeekModel"
    dense_layers: int
    dense_intermediate: int
    expert_groups: int
    groups_per_token: int
    routed_scale: float
    query_rank: int
    latent_rank: int
    rotary_width: int
    value_width: int
    rope_factor: float
    rope_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape(TokenShape):
    """Mamba-2: no attention; a convolution over the last ``kernel`` tokens and a recurrent state per head.

    ``groups`` heads share their input and output matrices; ``state`` is the width of the recurrence;
    ``chunk`` tokens are scanned at once in prefill.
    """

    builder = "tessera_core.trace.models.mamba:MambaModel"
    heads: int
    head_width: int
    groups: int
    state: int
    kernel: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageShape(DecoderShape):
    """Qwen2.5-VL: a vision tower whose features take the place of some of the prompt's tokens.

    The image of a request has ``image_rows`` x ``image_columns`` patches of ``patch`` x ``patch`` pixels;
    ``merge`` x ``merge`` patches make one token. Of the tower's ``vision_layers``, those in
    ``vision_full_layers`` attend to the whole image, all others within windows of ``vision_window`` pixels.
    ``rope_sections`` splits a rotary half into time, height and width.
    """

    builder = "tessera_core.trace.models.qwen_vl:QwenVisionModel"
    rope_sections: tuple[int, int, int]
    image_rows: int
    image_columns: int
    patch: int
    merge: int
    vision_layers: int
    vision_hidden: int
    vision_intermediate: int
    vision_heads: int
    vision_window: int
    vision_full_layers: tuple[int, ...]

    @property
    def image_tokens(self) -> int:
        """Tokens of the prompt that an image takes."""
        return self.image_rows * self.image_columns // self.merge**2


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionShape(Shape):
    """A Stable Diffusion 3.5 transformer: image and text tokens in joint attention.

    ``dual_layers``: the first layers have a second attention of the image to itself. ``positions``: edge of
    the table of position embeddings, in patches of ``patch`` x ``patch`` latents; ``sample``: edge of the
    latents that it is centred on. ``text_width`` and ``pooled_width``: of the text encoders' outputs.
    """

    builder = "tessera_core.trace.models.diffusion:DiffusionModel"
    layers: int
    heads: int
    head_width: int
    channels: int
    patch: int
    sample: int
    positions: int
    dual_layers: int
    text_tokens: int
    text_width: int
    pooled_width: int
