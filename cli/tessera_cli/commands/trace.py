"""``tessera trace``: a model becomes a record of its kernels that can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A catalogue name such as llama-tiny, FILE.py:FACTORY, an exported program (.pt2), a profile that"
            " PyTorch's profiler exported (.json, .json.gz), or a trace folder to add captures to.",
        ),
    ],
    output: Annotated[Path | None, options.folder("trace")] = None,
    program: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE:batch=B,context=C",
            help="An iteration to record; may be repeated. prefill: C prompt tokens; decode: C cached tokens;"
            " step (diffusion): latents of C x C.",
        ),
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="Short form for one program: prefill, decode or step.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Short form: requests in a batch.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Short form: tokens, or for step the latents' edge.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights; else the model's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    fake: Annotated[
        bool, typer.Option("--fake", help="Trace real sizes without the memory for them.")
    ] = False,
    tensor_parallel: Annotated[
        str | None,
        typer.Option(
            metavar="N|A,B,...", help="Trace one rank's shard: N equal ranks, or uneven shares such as 2,1."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="With --tensor-parallel: whose shard.")] = 0,
    ptx_target: Annotated[
        list[str] | None,
        typer.Option(metavar="ARCH", help="Compile Triton kernels to PTX for it (sm_90); may be repeated."),
    ] = None,
    capture: Annotated[
        str | None,
        typer.Option(metavar="cuda:N", help="Compile each kernel for this GPU and add its launches."),
    ] = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Capture the ops as PyTorch runs them eagerly.")
    ] = False,
    add_target: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRACE", help="Add the targets of another trace of this program; may be repeated."
        ),
    ] = None,
    execution_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile: the ExecutionTrace that was recorded with it."),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Profile: take ProfilerStep#N; else its last iteration."),
    ] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Profile: device type of the GPU that it was recorded on."),
    ] = None,
    trust_model: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Record a model's iterations, kernel by kernel.

    One program per phase, batch and context; all programs share the weights. A trace folder in place of the
    model gets the launches of further GPUs.
    """
    shown = Output(json=json)
    if no_compile and capture is None:
        raise typer.BadParameter("--no-compile says how to --capture; name the device too")
    exists = (Path(model) / "manifest.toml").is_file()
    if exists and capture is None and not add_target:
        raise typer.BadParameter(f"{model} is a trace: say what to add, --capture or --add-target")
    if exists and (
        program
        or phase
        or context
        or dtype
        or fake
        or tensor_parallel
        or rank
        or ptx_target
        or batch != 1
        or seed
        or execution_trace
        or iteration is not None
        or gpu_type
    ):
        raise typer.BadParameter(
            f"{model} is a trace, whose programs stay as they are: drop what isn't --capture or --add-target,"
            " or trace the model again"
        )
    if not exists and output is None:
        raise typer.BadParameter("name the trace folder to write: -o")
    from tessera_core.trace.inputs import input_kind

    kind = "trace" if exists else input_kind(model)
    optional = kind != "model" and not program and phase is None
    requests = () if optional else options.requests(program or [], phase, batch, context)
    recorded = {"--execution-trace": execution_trace, "--iteration": iteration, "--gpu-type": gpu_type}
    if kind == "kineto":
        assert output is not None
        if dtype or fake or tensor_parallel or ptx_target or capture or add_target or len(requests) > 1:
            raise typer.BadParameter(
                "a profile has one program, and kernels of one GPU as they were: drop the rest"
            )
        from tessera_core.trace.inputs.stage import RecordedStage

        imported = RecordedStage(
            path=Path(model),
            execution_trace=execution_trace,
            program=requests[0] if requests else None,
            iteration=iteration,
            gpu_type=gpu_type,
        )
        shown.show(imported.run(output, shown.progress))
        return
    for name, value in recorded.items():
        if value is not None:
            raise typer.BadParameter(f"{name} goes with a profile (.json), and {model} is none")
    from tessera_core.trace.capture.stage import CaptureStage
    from tessera_core.trace.stage import TraceStage

    adding = CaptureStage(
        device=capture,
        compiled=not no_compile,
        trusted=trust_model or not exists,  # tracing a model has run its code already
        add_targets=tuple(add_target or ()),
    )
    if exists:
        shown.show(adding.run(Path(model), output or Path(model), shown.progress))
        return
    assert output is not None
    stage = TraceStage(
        model=model,
        programs=requests,
        dtype=dtype,
        seed=seed,
        fake=fake,
        tensor_parallel=tensor_parallel,
        rank=rank,
        ptx_targets=tuple(ptx_target or ()),
        capture=adding if capture is not None or add_target else None,
    )
    shown.show(stage.run(output, shown.progress))
