"""What each kind of published table holds: its file, the columns that select a precision, and the sizes of a row.

Sizes are put into the project's own terms here (whole keys attended to, width per device), so that nothing further up
knows how the collector wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Columns: TypeAlias = Mapping[str, NDArray[np.int64]]

TABLE_DTYPES: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("bfloat16",),
    "float16": ("bfloat16",),
    "float8": ("fp8", "fp8_block"),
    "float8_block": ("fp8_block",),
    "float4": ("nvfp4",),
    "int8": ("sq",),
    "int8_wo": ("int8_wo",),
    "int4_wo": ("int4_wo",),
    "mxfp4_wo": ("w4a16_mxfp4",),
}
"""Our dtype -> the tables' names for it, the preferred one first.

float8: one scale per tensor or row; float8_block: one per 128 x 128 block. int8: weights and activations; NAME_wo:
weights only, products in bfloat16. The tables hold no float16: tensor cores run it at the rate of bfloat16.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of table. ``sizes``: our key -> the file's column; ``absent``: value where a file lacks the column.

    ``precision``: the column that names the dtype. ``fixed``: text columns and the one value that is read.
    ``own``: the file's sizes in our terms. ``without``: a part of ``kernel_source`` of rows that compute something
    else under the same sizes.
    """

    name: str
    folder: str
    file: str
    sizes: Mapping[str, str]
    precision: str | None
    fixed: Mapping[str, str]
    own: Callable[[Columns], Columns]
    absent: Mapping[str, int] | None = None
    without: str | None = None


def _as_written(sizes: Columns) -> Columns:
    return sizes


def _whole_context(sizes: Columns) -> Columns:
    """Decoding: a step is what the cache holds before the new position, which is attended to as well.

    So latencies say: they are flat up to ``step`` 127 and proportional to ``step`` + 1 in memory traffic after.
    """
    kept = {name: values for name, values in sizes.items() if name not in ("step", "queries")}
    return kept | {"context": sizes["step"] + sizes["queries"]}


def _width_per_device(sizes: Columns) -> Columns:
    """Experts: the width is the model's, divided by the number of devices that share each expert."""
    kept = {name: values for name, values in sizes.items() if name != "shards"}
    return kept | {"intermediate": sizes["intermediate"] // np.maximum(sizes["shards"], 1)}


def _same_width(sizes: Columns) -> Columns:
    """Mamba-2: the convolution's channels are those of its inputs and of both projections of the state."""
    channels = sizes["heads"] * sizes["head_dim"] + 2 * sizes["groups"] * sizes["state"]
    return {"channels": channels, "batch": sizes["batch"], "length": sizes["length"]}


_HEADS = {"batch": "batch_size", "heads": "num_heads", "kv_heads": "num_key_value_heads"}
_SINGLE = {"head_dim": "head_dim", "window": "window_size"}
_LATENT = {"batch": "batch_size", "heads": "num_heads"}
_BFLOAT16_CACHE = {"kv_cache_dtype": "bfloat16"}
_MIXER = {
    "batch": "batch_size",
    "length": "seq_len",
    "heads": "nheads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "d_state",
}

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="products",
            folder="gemm",
            file="gemm_perf.parquet",
            sizes={"m": "m", "n": "n", "k": "k"},
            precision="gemm_dtype",
            fixed={},
            own=_as_written,
        ),
        Family(
            name="attention-prefill",
            folder="attention",
            file="context_attention_perf.parquet",
            sizes={**_HEADS, **_SINGLE, "queries": "isl"},
            precision="attn_dtype",
            fixed=_BFLOAT16_CACHE,
            own=_as_written,
            absent={"window": 0},
        ),
        Family(
            name="attention-decode",
            folder="attention",
            file="generation_attention_perf.parquet",
            sizes={**_HEADS, **_SINGLE, "queries": "isl", "step": "step"},
            precision="attn_dtype",
            fixed=_BFLOAT16_CACHE,
            own=_whole_context,
            absent={"window": 0},
        ),
        Family(
            name="attention-encoder",
            folder="encoder_attention",
            file="encoder_attention_perf.parquet",
            sizes={"batch": "batch_size", "heads": "num_heads", "head_dim": "head_dim", "queries": "isl"},
            precision="attn_dtype",
            fixed={},
            own=_as_written,
        ),
        Family(
            name="latent-prefill",
            folder="mla",
            file="context_mla_perf.parquet",
            sizes={**_LATENT, "queries": "isl"},
            precision="mla_dtype",
            fixed=_BFLOAT16_CACHE,
            own=_as_written,
        ),
        Family(
            name="latent-decode",
            folder="mla",
            file="generation_mla_perf.parquet",
            sizes={**_LATENT, "queries": "isl", "step": "step"},
            precision="mla_dtype",
            fixed=_BFLOAT16_CACHE,
            own=_whole_context,
        ),
        *(
            Family(
                name=f"latent-{part}",
                folder="mla_bmm",
                file="mla_bmm_perf.parquet",
                sizes={"heads": "num_heads", "tokens": "num_tokens"},
                precision="bmm_dtype",
                fixed={"op_name": operation},
                own=_as_written,
            )
            for part, operation in (("keys", "mla_gen_pre"), ("values", "mla_gen_post"))
        ),
        Family(
            name="experts",
            folder="moe",
            file="moe_perf.parquet",
            sizes={
                "tokens": "num_tokens",
                "hidden": "hidden_size",
                "intermediate": "inter_size",
                "experts": "num_experts",
                "top_k": "topk",
                "shards": "moe_tp_size",
                "parts": "moe_ep_size",
            },
            precision="moe_dtype",
            fixed={"distribution": "power_law_1.01"},  # uneven, as routers choose, but not by much
            own=_width_per_device,
            without="nongated",
        ),
        Family(
            name="convolution-prefill",
            folder="linear_attention",
            file="mamba2_perf.parquet",
            sizes=_MIXER,
            precision=None,
            fixed={"phase": "context"},
            own=_same_width,
        ),
        Family(
            name="convolution-decode",
            folder="linear_attention",
            file="mamba2_perf.parquet",
            sizes=_MIXER,
            precision=None,
            fixed={"phase": "generation"},
            own=_same_width,
        ),
    )
}
"""All families by name."""
