"""The options of ``tessera trace``, each declared once with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A catalogue name such as llama-tiny, FILE.py:FACTORY, an exported program (.pt2), a profile that"
        " PyTorch's profiler exported (.json, .json.gz), or a trace folder to add captures to.",
    ),
]
Programs = Annotated[
    list[str] | None,
    typer.Option(
        "--program",
        metavar="PHASE:batch=B,context=C",
        help="An iteration to record; may be repeated. prefill: C prompt tokens; decode: C cached tokens;"
        " step (diffusion): latents of C x C.",
    ),
]
Phase = Annotated[str | None, typer.Option(help="Short form for one program: prefill, decode or step.")]
Batch = Annotated[int, typer.Option(min=1, help="Short form: requests in a batch.")]
Context = Annotated[
    int | None, typer.Option(min=1, help="Short form: tokens, or for step the latents' edge.")
]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the weights; else the model's own.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random weights.")]
Fake = Annotated[bool, typer.Option("--fake", help="Trace real sizes without the memory for them.")]
TensorParallel = Annotated[
    str | None,
    typer.Option(
        metavar="N|A,B,...", help="Trace one rank's shard: N equal ranks, or uneven shares such as 2,1."
    ),
]
Rank = Annotated[int, typer.Option(min=0, help="With --tensor-parallel: whose shard.")]
PtxTargets = Annotated[
    list[str] | None,
    typer.Option(
        "--ptx-target",
        metavar="ARCH",
        help="Compile Triton kernels to PTX for it (sm_90); may be repeated.",
    ),
]
Capture = Annotated[
    str | None,
    typer.Option(metavar="cuda:N", help="Compile each kernel for this GPU and add its launches."),
]
NoCompile = Annotated[
    bool, typer.Option("--no-compile", help="Capture the ops as PyTorch runs them eagerly.")
]
AddTargets = Annotated[
    list[Path] | None,
    typer.Option(
        "--add-target",
        metavar="TRACE",
        help="Add the targets of another trace of this program; may be repeated.",
    ),
]
ExecutionTrace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Profile: the ExecutionTrace that was recorded with it."),
]
Iteration = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Profile: take ProfilerStep#N; else its last iteration."),
]
GpuType = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="Profile: device type of the GPU that it was recorded on."),
]
