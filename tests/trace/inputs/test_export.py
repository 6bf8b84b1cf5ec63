"""An exported program traces, replays bit for bit, and runs through the pipeline; unsafe files are not loaded."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tessera_core.program.memory import Memory, view_of
from tessera_core.program.replay import run_program
from tessera_core.program.store import load_trace
from tessera_core.program.weights import initial_state, materialise_weights
from tests.trace.inputs.conftest import BATCH, CLUSTER, ONE_CPU, ROWS, CachedBlock, line, ok


def test_replay_is_bit_for_bit_what_the_model_computes_state_included(
    exported: Path, tmp_path: Path, tessera: Callable
) -> None:
    ok(
        tessera(
            "trace",
            exported / "block.pt2",
            "-o",
            "x.trace",
            "--program",
            f"decode:batch={BATCH},context={ROWS}",
        )
    )
    trace = load_trace(tmp_path / "x.trace")
    (program,) = trace.programs
    assert trace.info["source"] == "export" and trace.info["replayable"]
    assert set(program.bindings("state")) == {"cache", "position"}
    assert [(g.subject, g.value) for g in program.guards] == [("total_tokens", ROWS + 1)]
    weights = {weight.name: weight for weight in trace.weights}
    assert {"head.weight"} <= {"head.weight", *weights["embed.weight"].aliases}, "tied weights are one"
    assert len({w.buffer for w in trace.weights}) == len(weights)

    memory = Memory(trace)
    owned = [b.id for b in trace.buffers if b.kind in ("weight", "constant")]
    memory.bind_all(materialise_weights(trace, owned))
    memory.bind_all(initial_state(trace, program))
    reference = CachedBlock().eval()
    for token in ([[3], [7]], [[11], [0]], [[49], [5]]):
        tokens = torch.tensor(token)
        with torch.no_grad():
            expected = reference(tokens)
        given = trace.tensors[program.bindings("input")["tokens"].tensor]
        memory.bind(given.buffer, tokens.untyped_storage())
        run_program(trace, program, memory)
        for name, binding in program.bindings("output").items():
            assert torch.equal(memory.view(binding.tensor), expected[name]), name
        for name, binding in program.bindings("state").items():
            view = view_of(
                memory.storage(trace.tensors[binding.tensor].buffer), trace.tensors[binding.tensor]
            )
            assert torch.equal(view, getattr(reference, name)), name


def test_kernels_carry_the_modules_that_they_come_from(
    exported: Path, tmp_path: Path, tessera: Callable
) -> None:
    ok(tessera("trace", exported / "block.pt2", "-o", "x.trace"))
    (program,) = load_trace(tmp_path / "x.trace").programs
    assert program.name == f"step:batch={BATCH},context=1"
    assert [k.layer for k in program.kernels if k.name.startswith("layers")] == [0, 1]


@pytest.mark.parametrize("fake", [False, True])
def test_sizes_that_were_left_open_are_asked_for(
    exported: Path, tmp_path: Path, tessera: Callable, fake: bool
) -> None:
    words = ("trace", exported / "rows.pt2", "-o", "x.trace", *(("--fake",) if fake else ()))
    ok(tessera(*words))
    assert load_trace(tmp_path / "x.trace").programs[0].name == "step:batch=3,context=5"
    ok(tessera(*words, "--program", "step:batch=4,context=6", "--program", "step:batch=9,context=5"))
    trace = load_trace(tmp_path / "x.trace")
    shapes = [trace.tensors[p.bindings("input")["x"].tensor].shape for p in trace.programs]
    assert shapes == [(4, 6, 8), (9, 5, 8)]
    assert [w.init["kind"] for w in trace.weights] == ["export", "export"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pipeline_agrees_with_the_whole_program(
    exported: Path, tmp_path: Path, tessera: Callable, workers: int
) -> None:
    shutil.copy(exported / "block.pt2", tmp_path)
    (tmp_path / "c.toml").write_text(
        CLUSTER.format("cpu-1thread", "cpu-1thread") if workers == 2 else ONE_CPU
    )
    ok(tessera("trace", "block.pt2", "-o", "x.trace"))
    ok(tessera("ptx-deps", "x.trace", "-o", "x.deps"))
    ok(tessera("profile", "x.trace", "--device", "cpu-1thread", "-o", "x.profile.arrow"))
    strategy = ("--strategy", "placement" if workers == 2 else "single")
    plan = ("--cluster", "c.toml", "--policy", "throughput", *strategy, "-o", "x.plan.toml")
    ok(tessera("partition", "x.trace", "x.deps", "x.profile.arrow", *plan))
    run = (
        "run",
        "x.plan.toml",
        "--trace",
        "x.trace",
        "--deps",
        "x.deps",
        "--verify",
        "-o",
        "x.run",
        "--json",
    )
    assert json.loads(ok(tessera(*run)))["verified"] == "equal"
    (tmp_path / "block.pt2").write_bytes(b"another")
    done = tessera(*run)
    assert done.returncode == 1 and "has changed since the trace was made" in done.stderr
    (tmp_path / "block.pt2").unlink()
    done = tessera(*run)
    assert done.returncode == 1 and "--weights FILE.safetensors" in done.stderr


def test_sizes_outside_what_was_exported(exported: Path, tessera: Callable) -> None:
    done = tessera("trace", exported / "block.pt2", "-o", "x.trace", "--program", "step:batch=3,context=1")
    assert "was exported for a batch of 2" in line(done)
    done = tessera("trace", exported / "rows.pt2", "-o", "x.trace", "--program", "step:batch=1,context=5")
    assert "not 1; ask for a size in that range" in line(done)
    assert "drop --dtype" in line(
        tessera("trace", exported / "rows.pt2", "--dtype", "float16", "-o", "x.trace")
    )


def test_damaged_files(exported: Path, tmp_path: Path, tessera: Callable) -> None:
    whole = (exported / "block.pt2").read_bytes()
    (tmp_path / "half.pt2").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("other/readme", "no program")
    (tmp_path / "kept.trace").mkdir()
    for name, said in (("half", "part of one"), ("other", "cannot load it"), ("gone", "no such file")):
        assert said in line(tessera("trace", f"{name}.pt2", "-o", "x.trace"))
    assert not (tmp_path / "x.trace").exists()


def test_weights_of_another_byte_order(exported: Path, tmp_path: Path, tessera: Callable) -> None:
    with (
        zipfile.ZipFile(exported / "rows.pt2") as source,
        zipfile.ZipFile(tmp_path / "big.pt2", "w") as target,
    ):
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("/byteorder") else source.read(name))
    assert "was written on a machine of byte order 'big'" in line(
        tessera("trace", "big.pt2", "-o", "x.trace")
    )


def rewritten(
    source: Path, target: Path, changes: dict[str, Callable[[bytes], bytes]], more: dict[str, bytes]
) -> None:
    """The archive with some records changed and others added, in a form that PyTorch reads."""
    reader = torch._C.PyTorchFileReader(str(source))
    writer = torch._C.PyTorchFileWriter(str(target))
    for name in reader.get_all_records():
        if name not in (".data/version", ".data/serialization_id", "byteorder", "version"):
            content = changes.get(name, lambda same: same)(reader.get_record(name))
            writer.write_record(name, content, len(content))
    for name, content in more.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()


class Mine:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return Path.touch, (self.marker,)


def evil_inputs(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(((Mine(marker),), {}), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("record", "old", "new", "said"),
    [
        ("models/model.json", b"torch.ops.aten.relu.default", b"torch.hub.load", "no operator"),
        (
            "models/model.json",
            b"torch.ops.aten.relu.default",
            b"torch.ops.mine.relu.default",
            "a custom operator",
        ),
        (
            "models/model.json",
            b"torch.ops.aten.relu.default",
            b"torch.ops.aten.from_file.default",
            "more than compute",
        ),
        ("models/model.json", b"torch.ops.aten.relu.default", b"_operator.methodcaller", "no operator"),
        ("models/model.json", b"Symbol('s", b"eval('s", "more than arithmetic"),
        (
            "models/model.json",
            b"builtins.tuple",
            b"collections.defaultdict",
            "tuples, lists and dictionaries",
        ),
        (
            "data/weights/model_weights_config.json",
            b'"use_pickle": false',
            b'"use_pickle": true',
            "no plain tensor",
        ),
    ],
)
def test_what_loading_would_execute_is_refused(
    exported: Path, tmp_path: Path, tessera: Callable, record: str, old: bytes, new: bytes, said: str
) -> None:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new)

    rewritten(exported / "rows.pt2", tmp_path / "evil.pt2", {record: change}, {})
    assert said in line(tessera("trace", "evil.pt2", "-o", "x.trace"))


def test_pickles_and_libraries_are_not_loaded(exported: Path, tmp_path: Path, tessera: Callable) -> None:
    marker = tmp_path / "executed"
    changes = {"data/sample_inputs/model.pt": lambda _: evil_inputs(marker)}
    rewritten(exported / "rows.pt2", tmp_path / "evil.pt2", changes, {})
    assert "holds more than tensors" in line(tessera("trace", "evil.pt2", "-o", "x.trace"))
    library = {"data/aotinductor/model/a.so": b"\x7fELF"}
    rewritten(exported / "rows.pt2", tmp_path / "library.pt2", {}, library)
    assert "a compiled library" in line(tessera("trace", "library.pt2", "-o", "x.trace"))
    assert not marker.exists()


class Chooses(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([3.0, 1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x)
        return self.seen * 2


class Half(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex32)


@pytest.mark.parametrize(
    ("module", "argument", "said"),
    [
        (Chooses(), torch.ones(4), "depends on values"),
        (Odd(), torch.ones(3), "neither equal nor a range"),
        (Half(), torch.ones(4), "complex32"),
    ],
)
def test_programs_that_cannot_be_traced(
    tmp_path: Path, tessera: Callable, module: torch.nn.Module, argument: torch.Tensor, said: str
) -> None:
    torch.export.save(torch.export.export(module, (argument,)), tmp_path / "m.pt2")
    assert said in line(tessera("trace", "m.pt2", "-o", "x.trace"))
