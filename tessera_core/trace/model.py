"""What a model must offer to be traced: its weights, its state, example inputs and one step of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from tessera_core.program.ir import Guard, State
from tessera_core.trace.request import ProgramRequest


@runtime_checkable
class TraceableModel(Protocol):
    """What ``def factory(*, dtype: torch.dtype, seed: int)`` returns.

    ``module`` owns the weights. ``recipes`` gives each weight's init recipe by its qualified name (None: only
    the factory can make them). ``states`` declares the state families, and ``feeds`` which output becomes
    which input of the next iteration. A model may also have ``notes``, lines for the trace's manifest, and
    ``parallel_plan()``, how ranks can share it (:class:`~tessera_core.trace.parallel.plan.ParallelPlan`).
    """

    module: torch.nn.Module
    recipes: Mapping[str, dict[str, Any]] | None
    states: tuple[State, ...]
    feeds: Mapping[str, str]

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Fresh state by family name, allocated before tracing starts."""
        ...

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Example inputs by name."""
        ...

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run one iteration: mutates ``state`` in place and returns the outputs by name."""
        ...

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """Conditions under which the trace of ``request`` is valid."""
        ...
