"""User code as users write it: two CUDA streams in one step, and a custom op that launches Triton kernels itself.

A small recurrent decoder. Each step mixes its tokens twice: on the main stream by a matrix product, on a side
stream by ``two_streams::normed``, a custom op whose two Triton launches hand a temporary to each other. The side
stream waits for the embedding and the main one for the side stream's result, first by ``wait_stream``, then by an
event. ``factory`` is what ``tessera trace benchmarks/two_streams.py:factory`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessera_core.program.ir import Guard, State
from tessera_core.program.weights import initialise_module
from tessera_core.trace.declare import triton_cpu
from tessera_core.trace.request import ProgramRequest

VOCABULARY, WIDTH = 512, 128
_EPSILON = 1e-5


@triton.jit  # type: ignore[untyped-decorator]
def square_sums(source, sums, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of squares of each row of a dense matrix."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    values = tl.load(source + row * columns + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(values * values, 0))


@triton.jit  # type: ignore[untyped-decorator]
def scale_rows(source, sums, result, columns, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row divided by its root mean square."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    scale = 1.0 / tl.sqrt(tl.load(sums + row) / columns + epsilon)
    values = tl.load(source + row * columns + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * columns + place, values * scale, mask=inside)


def _square_sums(source: torch.Tensor, sums: torch.Tensor, columns: int, BLOCK: int) -> None:
    sums.copy_(source.float().view(-1, columns).square().sum(1))


def _scale_rows(
    source: torch.Tensor, sums: torch.Tensor, result: torch.Tensor, columns: int, epsilon: float, BLOCK: int
) -> None:
    scale = torch.rsqrt(sums / columns + epsilon).unsqueeze(1)
    result.view(-1, columns).copy_(source.float().view(-1, columns) * scale)


triton_cpu(square_sums, _square_sums, reads=("source",), writes=("sums",), must=("sums",))
triton_cpu(scale_rows, _scale_rows, reads=("source", "sums"), writes=("result",), must=("result",))


@torch.library.custom_op("two_streams::normed", mutates_args=())
def normed(source: torch.Tensor) -> torch.Tensor:
    """``source`` (rows, columns), dense, with each row divided by its root mean square."""
    rows, columns = source.shape
    sums = torch.empty(rows, dtype=torch.float32, device=source.device)
    result = torch.empty_like(source)
    block = triton.next_power_of_2(columns)
    square_sums[(rows,)](source, sums, columns, BLOCK=block)
    scale_rows[(rows,)](source, sums, result, columns, _EPSILON, BLOCK=block)
    return result


@normed.register_fake
def _(source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(source)


class TwoStreams:
    """The model; see :class:`tessera_core.trace.model.TraceableModel`."""

    states: tuple[State, ...] = (
        State(name="memory", batch_axis=0, sequence_axis=None, init={"kind": "zeros"}),
        State(name="position", batch_axis=None, sequence_axis=None, init={"kind": "zeros"}),
    )

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        shapes = {"embedding": (VOCABULARY, WIDTH), "left": (WIDTH, WIDTH), "right": (WIDTH, WIDTH)}
        self.module = torch.nn.ParameterDict(
            {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        ).requires_grad_(False)
        self.recipes: dict[str, dict[str, Any]] = {
            name: {"kind": "normal", "mean": 0.0, "std": WIDTH**-0.5} for name in shapes
        }
        self.feeds: Mapping[str, str] = {"next_token": "tokens"}
        initialise_module(self.module, self.recipes, seed)
        self.side = torch.cuda.Stream()

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Fresh state."""
        memory = torch.zeros(request.batch, WIDTH, dtype=self.module["left"].dtype)
        return {"memory": memory, "position": torch.zeros(1, dtype=torch.int64)}

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Tokens: the prompt of a prefill, one of each request in decode."""
        tokens = request.context if request.phase == "prefill" else 1
        return {"tokens": torch.zeros(request.batch, tokens, dtype=torch.int64)}

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One iteration on two streams."""
        module, main, side = self.module, torch.cuda.current_stream(), self.side
        embedded = torch.nn.functional.embedding(inputs["tokens"], module["embedding"]).mean(1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            right = normed(embedded @ module["right"])
            done = side.record_event()
        left = torch.tanh(embedded @ module["left"])
        main.wait_event(done)
        state["memory"].copy_(torch.tanh(state["memory"] + left * right))
        state["position"].add_(inputs["tokens"].shape[1])
        logits = state["memory"] @ module["embedding"].t()
        return {"logits": logits, "next_token": logits.argmax(-1, keepdim=True)}

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """Prompts have the traced length."""
        if request.phase != "prefill":
            return ()
        reason = f"traced for prompts of {request.context} tokens"
        return (
            Guard(subject="prompt_tokens", index=None, comparison="eq", value=request.context, reason=reason),
        )


def factory(*, dtype: torch.dtype, seed: int) -> TwoStreams:
    """What ``FILE.py:factory`` names."""
    return TwoStreams(dtype, seed)
