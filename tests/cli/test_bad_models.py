"""Models that can't be traced get one clear line with the place in the user's code, soon, and exit code 1."""

import time
from pathlib import Path

import pytest

from tests.cli.test_errors import one_line

MODEL = """
import socket, urllib.request
import torch
from tessera_core.program.ir import State

class Model:
    recipes, feeds = None, {}
    states = (State(name="memory", batch_axis=0, sequence_axis=None, init={"kind": "zeros"}),)
    def __init__(self, step, make=torch.zeros):
        self.module, self.does, self.make = torch.nn.Linear(8, 8), step, make
    def make_state(self, request): return {"memory": self.make(request.batch, 8)}
    def make_inputs(self, request): return {"tokens": torch.zeros(request.batch, 1, dtype=torch.int64)}
    def step(self, request, inputs, state): return {"y": self.does(self.module(state["memory"]), inputs["tokens"])}
    def guards(self, request): return ()

def traced(step):
    return lambda *, dtype, seed: Model(step)

def branches(x, tokens):
    return x if x.sum().item() > 0 else -x  # here: branches
branch = traced(branches)

def positive(x, tokens):
    return x[(x > 0).nonzero()[:, 0]]  # here: positive
nonzero = traced(positive)

def listed(x, tokens):
    return x * len([v for v in x[0].tolist() if v > 0])  # here: listed
tolist = traced(listed)

def small(x, tokens):
    return x.to(torch.complex32)  # here: small
half_complex = traced(small)

def packed(x, tokens):
    return torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # here: packed
float4 = traced(packed)

def quantised(x, tokens):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()  # here: quantised
qint8 = traced(quantised)

def thin(x, tokens):
    return x.to_sparse()  # here: thin
sparse = traced(thin)

def ragged(x, tokens):
    return torch.nested.nested_tensor([x[0], x[0]]).to_padded_tensor(0.0)  # here: ragged
nested = traced(ragged)

def sparse_state(*, dtype, seed):
    return Model(thin, lambda *shape: torch.zeros(*shape).to_sparse())

def connects(*, dtype, seed):
    socket.create_connection(("10.255.255.1", 80), timeout=600)  # here: connects

def looks_up(*, dtype, seed):
    try:
        urllib.request.urlopen("http://example.com/weights")  # here: looks_up
    except Exception as problem:
        raise ValueError("no weights") from problem

def hub(*, dtype, seed):
    from transformers import AutoConfig
    return AutoConfig.from_pretrained("some-team/some-model")  # here: hub
"""


@pytest.mark.parametrize("more", [(), ("--fake",)])
@pytest.mark.parametrize(
    ("factory", "place", "says"),
    [
        ("branch", "branches", "reads a value on the host that"),
        ("nonzero", "positive", "its result's shape depends on values that only a run knows; use a mask"),
        ("tolist", "listed", "reads a value on the host that"),
        ("half_complex", "small", "dtype complex32: cannot be traced; convert the tensor to one of bool"),
        ("float4", "packed", "dtype float4_e2m1fn_x2: cannot be traced"),
        ("qint8", "quantised", "dtype qint8: cannot be traced"),
        ("sparse", "thin", "makes a tensor of layout sparse_coo; make it dense"),
        ("nested", "ragged", "_nested_tensor_from_tensor_list"),
        ("sparse_state", None, "state memory: is a tensor of layout sparse_coo; make it dense"),
        ("connects", "connects", "its factory needs the network (10.255.255.1:80)"),
        ("looks_up", "looks_up", "its factory needs the network (example.com)"),
    ],
)
def test_a_model_that_cannot_be_traced(
    tessera, tmp_path: Path, factory: str, place: str | None, says: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "m.py").write_text(MODEL)
    started = time.monotonic()
    done = tessera("trace", f"m.py:{factory}", *more, "--program", "decode:batch=1,context=8", "-o", "OUT")
    assert time.monotonic() - started < 30
    line = one_line(done)
    assert says in line
    if place is not None:
        number = 1 + next(i for i, text in enumerate(MODEL.splitlines()) if text.endswith(f"# here: {place}"))
        assert f"m.py:{number}" in line
    assert not (tmp_path / "OUT").exists()


def test_a_factory_that_asks_a_hub_fails_at_once_and_says_what_to_do(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # as users have it; the library reads it when it is imported
    (tmp_path / "m.py").write_text(MODEL)
    line = one_line(process("trace", "m.py:hub", "--program", "decode:batch=1,context=8", "-o", "OUT"))
    assert "its factory needs the network (huggingface.co) at " in line and "m.py:" in line
    assert "OSError: " in line and "build the model from a configuration" in line


@pytest.mark.parametrize("dtype", ["int8", "float4_e2m1fn_x2", "qint8", "Tensor", "float8_e5m2", ""])
def test_a_dtype_that_no_weights_have(tessera, tmp_path: Path, dtype: str) -> None:
    words = ("--dtype", dtype, "--program", "decode:batch=1,context=8", "-o", "OUT")
    line = one_line(tessera("trace", "demo", *words))
    assert repr(dtype) in line or "normal" in line
    assert not (tmp_path / "OUT").exists()
