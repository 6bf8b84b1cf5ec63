"""The whole iteration, captured as PyTorch runs it eagerly, against the recorded ops.

Every graph node must be made inside an operator call that the dispatcher sees (or a Triton launch), and every
such operator must be one that the trace records; what runs behind their backs is an error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_core.program.ir import Program, Trace
from tessera_core.program.replay import TRITON
from tessera_core.trace.capture.driver import nodes_while_capturing, read_graph
from tessera_core.trace.capture.graph import RawLaunch
from tessera_core.trace.factory import build
from tessera_core.trace.fake import new_fake_mode
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.place import user_code
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.tracer import ATTENTION
from tessera_formats.errors import TrustError, UntracedLaunchError

# A reshape copies where a device lays its argument out otherwise than the CPU did; replay copies there too.
_LAYOUT_COPIES = frozenset({"aten.clone.default"})


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What the eager iteration launched: launches in all, and per operator in order of first use."""

    program: str
    launches: int
    by_op: dict[str, int]


@dataclass(slots=True)
class Ledger:
    """Which operator made which node. ``nodes`` tells the nodes that exist now."""

    nodes: Callable[[], frozenset[int]]
    owner: dict[int, str] = field(default_factory=dict)
    inside: bool = False

    @contextlib.contextmanager
    def during(self, op: str) -> Iterator[None]:
        """Whatever is launched inside belongs to ``op``; a call within a noted call is part of that."""
        if self.inside:
            yield
            return
        before, self.inside = self.nodes(), True
        try:
            yield
        finally:
            self.inside = False
        for node in self.nodes() - before:
            self.owner[node] = op


def unexplained(
    launches: Sequence[RawLaunch], owner: dict[int, str], recorded: frozenset[str]
) -> list[tuple[str, str]]:
    """(function, reason) of each launch that no recorded op explains."""
    found = []
    for launch in launches:
        op = owner.get(launch.node)
        if op is None:
            found.append((launch.function, "no operator call made it"))
        elif op not in recorded:
            found.append((launch.function, f"{op} made it, which the trace does not record"))
    return found


def check_launches(program: Program, launches: Sequence[RawLaunch], owner: dict[int, str]) -> Reconciled:
    """Raise :class:`UntracedLaunchError` for the first launch that no recorded op explains."""
    recorded = frozenset(op.target for op in program.ops) | _LAYOUT_COPIES
    bad = unexplained(launches, owner, recorded)
    if bad:
        function, reason = bad[0]
        raise UntracedLaunchError(
            f"{program.name}: launch of {function}: {reason} ({len(bad)} such launches of {len(launches)});"
            " register the call as a custom op (torch.library.custom_op) and trace again"
        )
    counts = Counter(owner[launch.node] for launch in launches)
    return Reconciled(program.name, len(launches), dict(counts))


def reconcile(trace: Trace, device: str, trusted: bool) -> tuple[Reconciled, ...]:
    """Capture every program's step eagerly on ``device``; weights have no meaningful values.

    Raises :class:`UntracedLaunchError` as :func:`check_launches`, and :class:`TrustError` for a user's factory
    without ``trusted``.
    """
    if trace.info["source"] not in ("catalogue", "embedded") and not trusted:
        raise TrustError(
            f"model {trace.info['model']}: is code of the user's; pass --trust-model if you trust it"
        )
    mode = new_fake_mode()
    dtype = getattr(torch, str(trace.info["dtype"]))
    built = build(str(trace.info["model"]), dtype, int(trace.info["seed"]), mode, on_device=True)
    materialise(built.model.module, device)
    return reconcile_model(trace, built.model, device)


def reconcile_model(trace: Trace, model: TraceableModel, device: str) -> tuple[Reconciled, ...]:
    """The same for a model that lies on ``device`` already."""
    found = []
    for program in trace.programs:
        request = ProgramRequest(program.phase, program.batch, program.context)
        with torch.device(device), torch.no_grad():
            state = {name: t.to(device) for name, t in model.make_state(request).items()}
            inputs = {name: t.to(device) for name, t in model.make_inputs(request).items()}
            found.append(_capture_step(program, model, request, inputs, state, device))
    return tuple(found)


def materialise(module: torch.nn.Module, device: str) -> None:
    """Give a module that was built without memory zeros on ``device``."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            fresh = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(part, name, torch.nn.Parameter(fresh, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


class _OpLedger(TorchDispatchMode):
    """Notes the nodes of each operator call that reaches the dispatcher."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.ledger.during(str(func)):
            return func(*args, **(kwargs or {}))


class _AttentionLedger(TorchFunctionMode):
    """Attention is recorded as the composite operator, whatever a device makes of it."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention or func is ATTENTION:
            with self.ledger.during(str(ATTENTION)):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _launches_noted(ledger: Ledger) -> Iterator[None]:
    """Raw Triton launches, noted under the name that a trace gives them."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with ledger.during(f"{TRITON}{kernel.fn.__module__}:{kernel.fn.__qualname__}"):
            return run(kernel, *args, **kwargs)

    JITFunction.run = noted
    try:
        yield
    finally:
        JITFunction.run = run


def _capture_step(
    program: Program,
    model: TraceableModel,
    request: ProgramRequest,
    inputs: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    device: str,
) -> Reconciled:
    """The step on a stream of its own; side streams that it forks and joins belong to the same graph."""
    stream = torch.cuda.Stream(device)
    ledger = Ledger(lambda: nodes_while_capturing(stream.cuda_stream))
    advice = "make the step one that a CUDA graph can hold (side streams joined, no host synchronisation)"
    with torch.cuda.stream(stream), user_code(f"{program.name}: its step, captured on {device},", advice):
        model.step(request, dict(inputs), dict(state))
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with _launches_noted(ledger), _OpLedger(ledger), _AttentionLedger(ledger):
                model.step(request, dict(inputs), dict(state))
        finally:
            graph.capture_end()
    launches = read_graph(int(graph.raw_cuda_graph())).launches
    graph.reset()
    return check_launches(program, launches, ledger.owner)
