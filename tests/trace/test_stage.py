import hashlib
import sys
from pathlib import Path

import pytest

from tessera_core.program.store import load_trace
from tessera_core.program.weights import materialise_weights
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.stage import TraceStage
from tessera_formats.errors import InputError, ModelError, TesseraError
from tessera_formats.trace import read_trace

DECODE = ProgramRequest("decode", 2, 8)
MODEL = """
import torch
from tessera_core.program.ir import Guard, State

class Model:
    feeds = {"y": "x"}
    recipes = None
    states = (State(name="total", batch_axis=0, sequence_axis=None, init={"kind": "zeros"}),)
    def __init__(self, dtype, seed):
        torch.manual_seed(seed)
        self.module = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
    def make_state(self, request):
        return {"total": torch.zeros(request.batch, 8, dtype=self.module.weight.dtype)}
    def make_inputs(self, request):
        return {"x": torch.ones(request.batch, 8, dtype=self.module.weight.dtype)}
    def step(self, request, inputs, state):
        state["total"].add_(self.module(inputs["x"]))
        return {"y": state["total"].tanh()}
    def guards(self, request):
        return (Guard(subject="total_tokens", index=None, comparison="le", value=8, reason="cache"),)

def factory(*, dtype, seed):
    return Model(dtype, seed)

def failing(*, dtype, seed):
    raise ValueError("no such checkpoint")

def wrong(*, dtype, seed):
    return 3

def leaving(*, dtype, seed):
    raise SystemExit("bye")
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model.py"
    path.write_text(MODEL)
    return path


def stage(model: str, **options: object) -> TraceStage:
    values: dict[str, object] = {"model": model, "programs": (DECODE,), **options}
    return TraceStage(**values)  # type: ignore[arg-type]


def test_a_users_factory_is_traced(model: Path, tmp_path: Path) -> None:
    facts = stage(f"{model}:factory", dtype="float64", seed=5).run(tmp_path / "m.trace")
    read_trace(tmp_path / "m.trace").check()
    trace = load_trace(tmp_path / "m.trace")
    assert trace.info["source"] == "factory" and trace.info["seed"] == 5
    assert trace.info["dtype"] == "float64" and trace.info["replayable"] is True
    assert trace.info["factory"] == f"{model}:factory"
    assert trace.info["factory_hash"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert [weight.init for weight in trace.weights] == [{"kind": "factory"}]
    assert [guard.value for guard in trace.programs[0].guards] == [8]
    assert trace.programs[0].bindings("output")["y"].feeds == "x"
    assert facts.values["weight_bytes"] == 8 * 8 * 8
    assert facts.tables[0].rows[0][:3] == ("decode:batch=2,context=8", 3, 3)


def test_the_same_model_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for name in ("a.trace", "b.trace"):
        stage(f"{model}:factory").run(tmp_path / name)
    first, second = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()}
        for n in ("a.trace", "b.trace")
    )
    assert first == second


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("llama-tinny", InputError, "did you mean llama-tiny"),
        ("gpt", InputError, "llama-tiny"),
        ("{file}:nothing", InputError, "has no function nothing"),
        ("{file}", InputError, "names no factory"),
        ("{folder}/missing.py:factory", InputError, "there is no file"),
        ("{file}:failing", ModelError, "ValueError: no such checkpoint at {file}:{line}"),
        ("{file}:leaving", ModelError, "its factory raises SystemExit: bye at {file}:"),
        ("{file}:wrong", ModelError, "the factory returns an object of type int"),
    ],
)
def test_a_bad_model_is_one_line(
    model: Path, tmp_path: Path, name: str, kind: type[TesseraError], says: str
) -> None:
    line = 1 + MODEL.splitlines().index('    raise ValueError("no such checkpoint")')
    places = {"file": str(model), "folder": str(tmp_path), "line": line}
    with pytest.raises(kind) as raised:
        stage(name.format(**places)).run(tmp_path / "m.trace")
    assert says.format(**places) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "m.trace").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import torch\nimport a_module_that_nobody_has\n",
            r"ModuleNotFoundError: .* at .*broken_model.py:2; ",
        ),
        ("import torch\n\ndef factory(:\n", r"SyntaxError: invalid syntax at .*/broken_model.py:3; "),
        ("import broken_part\n", r"SyntaxError: .* at .*/broken_part.py:2; "),
        ("raise SystemExit(3)\n", r"SystemExit: 3 at .*/broken_model.py:1; "),
        ("raise ValueError('one\\n  two\\n\\nthree')\n", r"ValueError: one two three at .*:1; "),
        ("raise ValueError('long ' * 1000)\n", r"ValueError: (long ){100,200}\.\.\. at .*:1; "),
    ],
)
def test_a_file_that_does_not_import_is_one_line(tmp_path: Path, source: str, says: str) -> None:
    path = tmp_path / "broken_model.py"
    path.write_text(source)
    (tmp_path / "broken_part.py").write_text("x = 1\ny = (\n")
    with pytest.raises(ModelError, match=rf"^model '.*': its factory raises {says}correct it") as raised:
        stage(f"{path}:factory").run(tmp_path / "m.trace")
    assert "\n" not in str(raised.value)


def test_what_the_users_code_prints_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talking_model.py"
    text = MODEL
    for line in ("class Model:", "def factory(", "    def make_", "    def step(", "    def guards("):
        assert line in text
    lines = [
        f"{line}\n{' ' * 8}print('in method')" if "self, request" in line else line
        for line in text.splitlines()
    ]
    path.write_text(
        "print('at import')\n" + "\n".join(lines).replace("return Model(", "print('made'); return Model(")
    )
    stage(f"{path}:factory").run(tmp_path / "m.trace")
    trace = load_trace(tmp_path / "m.trace")
    del sys.modules["talking_model"]
    materialise_weights(trace, [weight.buffer for weight in trace.weights], trusted=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("at import") == said.err.count("made") == 2
    assert said.err.count("in method") == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"programs": ()}, "no program to trace"),
        ({"programs": (DECODE, DECODE)}, "is asked for twice"),
        ({"dtype": "float7"}, "is not a dtype of weights"),
        ({"ptx_targets": ("sm90",)}, "is no architecture"),
    ],
)
def test_bad_options_are_refused_before_anything_is_built(
    model: Path, tmp_path: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        stage(f"{model}:factory", **options).run(tmp_path / "m.trace")


def test_a_failing_trace_leaves_the_older_one(model: Path, tmp_path: Path) -> None:
    stage(f"{model}:factory").run(tmp_path / "m.trace")
    digest = read_trace(tmp_path / "m.trace").digest
    with pytest.raises(ModelError):
        stage(f"{model}:failing").run(tmp_path / "m.trace")
    assert read_trace(tmp_path / "m.trace").digest == digest


def test_real_sizes_need_no_memory(tmp_path: Path) -> None:
    facts = stage(
        "llama-3-8b", fake=True, programs=(ProgramRequest("decode", 64, 1024),), dtype="bfloat16"
    ).run(tmp_path / "d.trace")
    assert facts.values["weight_bytes"] > 16e9
    assert facts.values["seconds"] < 30
    trace = load_trace(tmp_path / "d.trace")
    assert trace.info["fake"] is True
    layers = {k.layer for k in trace.programs[0].kernels if k.layer is not None}
    assert layers == set(range(32))
    assert len({k.signature for k in trace.programs[0].kernels}) < 25
