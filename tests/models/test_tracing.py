"""Every tiny model: what --fake records is what is recorded with values, and the command line traces it."""

from pathlib import Path

import pytest
import torch

from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace, trace_tables
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import build
from tessera_core.trace.fake import new_fake_mode
from tessera_core.trace.fused.table import FUSED, SHARD_OPERATORS, fused_operator
from tessera_core.trace.models import build_model, model_names
from tessera_core.trace.request import ProgramRequest, parse_program
from tessera_formats.errors import InputError
from tessera_formats.trace import program_digest

TINY = [name for name in model_names() if name.endswith("-tiny")]
FUSED_OPERATORS = {
    "gpt-oss-tiny": {"sink_attention", "clamped_experts"},
    "qwen3-tiny": {"gated_experts"},
    "deepseek-tiny": {"gated_experts", "latent_attention"},
    "mamba-codestral-tiny": {
        "causal_convolution",
        "causal_convolution_step",
        "selective_scan",
        "selective_step",
    },
}


def programs_of(name: str) -> list[str]:
    if "diffusion" in name:
        return ["step:batch=2,context=16"]
    return ["prefill:batch=2,context=16", "decode:batch=4,context=64"]


def needs(name: str) -> None:
    pytest.importorskip("diffusers" if "diffusion" in name else "transformers")


def trace_of(name: str, fake: bool, dtype: torch.dtype | None = None) -> Trace:
    mode = new_fake_mode() if fake else None
    requests = [parse_program(program) for program in programs_of(name)]
    return trace_model(build(name, dtype, 0, mode), requests, seed=0, fake_mode=mode, versions={}).trace


def digest(trace: Trace) -> str:
    return program_digest(trace_tables(trace), trace.constants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY)
def test_fake_traces_equal_real_ones(name: str, dtype: torch.dtype) -> None:
    needs(name)
    real, fake = trace_of(name, False, dtype), trace_of(name, True, dtype)
    for program in real.programs:
        twin = fake.program(program.name)
        assert [k.signature for k in twin.kernels] == [k.signature for k in program.kernels]
        assert [k.flops for k in twin.kernels] == [k.flops for k in program.kernels]
    # In bfloat16, some decode steps still differ in the stride of an extent of one.
    assert dtype != torch.float32 or digest(fake) == digest(real)
    used = {op.target.split(".")[1] for p in real.programs for op in p.ops if fused_operator(op.target)}
    assert used == FUSED_OPERATORS.get(name, set())
    assert real.info["replayable"] is True


def test_every_fused_operator_is_used() -> None:
    assert set().union(*FUSED_OPERATORS.values()) == set(FUSED) - SHARD_OPERATORS


def test_fused_kernels_count_what_they_do() -> None:
    """Operations by hand, and no more bytes of experts and windows than are read."""
    pytest.importorskip("transformers")
    trace = trace_of("gpt-oss-tiny", True)
    prefill, decode = ({k.name: k for k in program.kernels if k.layer == 0} for program in trace.programs)
    experts = prefill["mlp.experts clamped_experts 32x96"]
    assert (experts.kind, experts.flops) == ("matmul", 32 * 2 * 6 * 96 * 96)
    weights = 8 * (96 * 192 + 192 + 96 * 96 + 96) * 4
    assert experts.read_bytes == weights + 32 * 96 * 4 + 32 * 2 * (8 + 4)
    window = prefill["layers.self_attn sink_attention 2x16x8x16"]
    pairs = sum(min(row + 1, 8) for row in range(16))
    assert (window.kind, window.flops) == ("attention", 2 * 8 * pairs * 4 * 16)
    window = decode["layers.self_attn sink_attention 4x1x8x16"]
    assert window.flops == 4 * 8 * 8 * 4 * 16
    cache = 2 * 4 * 2 * 8 * 16 * 4  # keys and values: 8 of 64 rows
    assert window.read_bytes == cache + 4 * 8 * 16 * 4 + 8 * 4 + 8
    few = trace_model(
        build("gpt-oss-tiny", None, 0, None),
        [ProgramRequest("decode", 1, 16)],
        seed=0,
        fake_mode=None,
        versions={},
    ).trace
    (experts,) = (k for k in few.programs[0].kernels if k.layer == 0 and "clamped_experts" in k.name)
    assert experts.read_bytes == weights // 8 * 2 + 96 * 4 + 2 * (8 + 4)


@pytest.mark.parametrize("name", TINY)
def test_the_command_line_traces_it(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needs(name)
    from tessera_cli.main import main

    options = [word for program in programs_of(name) for word in ("--program", program)]
    with pytest.raises(SystemExit) as done:
        main(["trace", name, *options, "-o", str(tmp_path / "x.trace")])
    assert not done.value.code
    trace = load_trace(tmp_path / "x.trace")
    assert [program.name for program in trace.programs] == programs_of(name)
    assert trace.info["notes"] == list(getattr(build_model(name, None, 0), "notes", ()))
    assert name in capfd.readouterr().out


def test_the_recurrence_writes_its_state_for_certain() -> None:
    pytest.importorskip("transformers")
    trace = trace_of("mamba-codestral-tiny", True)
    for program in trace.programs:
        states = {binding.tensor for binding in program.bindings("state").values()}
        writers = [k for k in program.kernels if k.state_writer != "none"]
        assert {k.state_writer for k in writers} == {"compute"}
        writes = [
            operand
            for op in program.ops
            for operand in op.operands
            if operand.tensor in states and operand.mode == "write"
        ]
        reads = [
            operand
            for op in program.ops
            for operand in op.operands
            if operand.tensor in states and operand.mode == "read"
        ]
        assert len(writes) == len(states) and all(operand.must for operand in writes)
        assert bool(reads) == (program.phase == "decode"), "a prompt starts from nothing"


def test_an_image_asks_nothing_of_the_host() -> None:
    pytest.importorskip("transformers")
    for program in trace_of("qwen2.5-vl-tiny", True).programs:
        subject = "prompt_tokens" if program.phase == "prefill" else "total_tokens"
        assert [guard.subject for guard in program.guards] == [subject]


def test_an_image_needs_room_in_the_prompt() -> None:
    pytest.importorskip("transformers")
    model = build_model("qwen2.5-vl-tiny", None, 0)
    with pytest.raises(InputError, match="at least 10"):
        model.make_inputs(ProgramRequest("prefill", 1, 9))
