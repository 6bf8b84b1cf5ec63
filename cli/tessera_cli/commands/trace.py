"""``tessera trace``: a model becomes a record of its kernels that can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.commands import trace_options as own
from tessera_cli.output import Output
from tessera_formats.errors import UsageError


def command(
    model: own.Model,
    output: Annotated[Path | None, options.folder("trace")] = None,
    programs: own.Programs = None,
    phase: own.Phase = None,
    batch: own.Batch = 1,
    context: own.Context = None,
    dtype: own.Dtype = None,
    seed: own.Seed = 0,
    fake: own.Fake = False,
    tensor_parallel: own.TensorParallel = None,
    rank: own.Rank = 0,
    ptx_targets: own.PtxTargets = None,
    capture: own.Capture = None,
    no_compile: own.NoCompile = False,
    add_targets: own.AddTargets = None,
    execution_trace: own.ExecutionTrace = None,
    iteration: own.Iteration = None,
    gpu_type: own.GpuType = None,
    catalogue: options.Catalogues = None,
    trust_model: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Record a model's iterations, kernel by kernel.

    One program per phase, batch and context; all programs share the weights. A trace folder in place of the
    model gets the launches of further GPUs.
    """
    from tessera_core.trace.choice import TraceChoice

    shown = Output(json=json)
    choice = TraceChoice(
        model=model,
        output=output,
        programs=tuple(programs or ()),
        phase=phase,
        batch=batch,
        context=context,
        dtype=dtype,
        seed=seed,
        fake=fake,
        tensor_parallel=tensor_parallel,
        rank=rank,
        ptx_targets=tuple(ptx_targets or ()),
        capture=capture,
        no_compile=no_compile,
        add_targets=tuple(add_targets or ()),
        execution_trace=execution_trace,
        iteration=iteration,
        gpu_type=gpu_type,
        catalogues=tuple(catalogue or ()),
        trust_model=trust_model,
    )
    try:
        shown.show(choice.run(shown.progress))
    except UsageError as problem:
        raise typer.BadParameter(str(problem)) from problem
