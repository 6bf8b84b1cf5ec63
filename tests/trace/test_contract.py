"""What a model promises about its state and its feeds is checked while it is traced."""

from collections.abc import Callable, Mapping

import pytest
import torch

from tessera_core.program.ir import Trace
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import BuiltModel
from tessera_core.trace.fake import building, new_fake_mode
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import ModelError
from tests.trace.conftest import Step, ToyModel

Tensors = dict[str, torch.Tensor]


class TwoPhases(ToyModel):
    """Prefill takes ``prompt`` and decode ``tokens``; prefill's only output is ``next_token``."""

    def __init__(self, feeds: Mapping[str, str], shape: tuple[int, ...] = (1,), kind: str = "int64") -> None:
        super().__init__(lambda net, inputs, state: {})
        self.feeds, self._shape, self._dtype = feeds, shape, getattr(torch, kind)

    def make_inputs(self, request: ProgramRequest) -> Tensors:
        prefill = request.phase == "prefill"
        name, tokens = ("prompt", request.context) if prefill else ("tokens", 1)
        return {name: torch.zeros(request.batch, tokens, dtype=torch.int64)}

    def step(self, request: ProgramRequest, inputs: Tensors, state: Tensors) -> Tensors:
        (tokens,) = inputs.values()
        state["cache"].add_(1)
        made = tokens[:, -1:].add(1).expand(-1, *self._shape).to(self._dtype).clone()
        return {"next_token": made} | ({} if request.phase == "prefill" else {"logits": made * 2})


def traced(model: ToyModel, *batches: int) -> Trace:
    phases = ("prefill", "decode")[-len(batches) :]
    requests = [ProgramRequest(phase, batch, 8) for phase, batch in zip(phases, batches, strict=True)]
    built = BuiltModel(model, {"model": "toy", "source": "factory"}, "float32")
    return trace_model(built, requests, seed=0, fake_mode=None, versions={}).trace


def test_feeds_may_lead_to_what_only_some_programs_have() -> None:
    prefill, decode = traced(TwoPhases({"next_token": "tokens"}), 1, 2).programs
    assert "tokens" not in prefill.bindings("input")
    assert prefill.bindings("output")["next_token"].feeds == "tokens"
    assert decode.bindings("output")["next_token"].feeds == "tokens"
    assert decode.bindings("output")["logits"].feeds is None
    traced(TwoPhases({"logits": "tokens"}), 1, 2)


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({"token": "tokens"}, "feeds names output 'token', which no step returns"),
        ({"next_token": "token"}, "output next_token feeds 'token', which is no input"),
    ],
)
def test_feeds_of_names_that_no_program_has_are_refused(feeds: Mapping[str, str], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        traced(TwoPhases(feeds), 1, 2)


@pytest.mark.parametrize(
    ("shape", "kind", "says"),
    [
        (
            (2,),
            "int64",
            r"int64 \[1, 2\], and input tokens of decode:batch=2,context=8, which it feeds, int64",
        ),
        ((1,), "int32", r"is int32 \[1, 1\]"),
    ],
)
def test_feeds_between_unlike_tensors_are_refused(shape: tuple[int, ...], kind: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        traced(TwoPhases({"next_token": "tokens"}, shape, kind), 1, 2)
    with pytest.raises(ModelError, match="make them agree"):
        traced(TwoPhases({"next_token": "tokens"}, shape, kind), 2)


def rebinding(change: Callable[[Tensors], object]) -> Step:
    def step(net: torch.nn.Module, inputs: Tensors, state: Tensors) -> Tensors:
        change(state)
        return {"y": state["cache"] * 2} if "cache" in state else {"y": inputs["tokens"] * 2}

    return step


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.update(cache=s["cache"] + 1), "rebinds state 'cache', and the new value would be lost"),
        (lambda s: s.update(cache=s["cache"][:, 1:]), "rebinds state 'cache'"),
        (lambda s: s.update(position=torch.ones(1, dtype=torch.int64)), "rebinds state 'position'"),
        (lambda s: s.update(position=3), "rebinds state 'position'"),
        (lambda s: s.update(hidden=s["cache"] + 1), "puts 'hidden' into state"),
    ],
)
def test_a_step_that_rebinds_state_is_refused(
    change: Callable[[Tensors], object], says: str, fake: bool
) -> None:
    mode = new_fake_mode() if fake else None
    with building(mode):
        model = ToyModel(rebinding(change))
    built = BuiltModel(model, {"model": "toy", "source": "factory"}, "float32")
    with pytest.raises(ModelError, match=says):
        trace_model(built, [ProgramRequest("decode", 2, 8)], seed=0, fake_mode=mode, versions={})


@pytest.mark.parametrize("fake", [False, True])
def test_state_written_in_place_is_kept(tracer: Callable[..., object], fake: bool) -> None:
    def in_place(state: Tensors) -> None:
        state["cache"] += 1
        state["cache"][:, :1] = 3
        state["position"] = state["position"].add_(1)
        del state["position"]

    tracer(rebinding(in_place), fake)
