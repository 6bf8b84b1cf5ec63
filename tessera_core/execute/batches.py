"""Requests put into batches, and batches dealt to routes by their shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.adapt.arrivals import Arrival
from tessera_core.execute.segments import RouteModel
from tessera_core.execute.simulator import BatchPlan
from tessera_core.program.guards import beyond_lengths, check_guards, check_lengths, guarded_inputs
from tessera_core.program.ir import Program, Trace
from tessera_formats.errors import InputError

BATCHES_PER_SLOT = 2
"""How many batches a run has without a stated number: enough to see slots refilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """A batch of requests with consecutive ids from ``first``, and what is to be run for it."""

    plan: BatchPlan
    first: int
    requests: tuple[Arrival, ...]

    @property
    def count(self) -> int:
        """Number of requests; a short batch's further rows repeat its last one."""
        return len(self.requests)


def planned_tokens(model: RouteModel) -> int:
    """Tokens per request that the plan assumed: one of the prefill and one of each decode iteration."""
    return model.programs[-1].rate + (1 if len(model.programs) > 1 else 0)


def fixed_batches(
    models: Sequence[RouteModel], batches: int | None, output_tokens: int | None
) -> list[RequestBatch]:
    """``batches`` full batches (None: a few per slot), all there from the start."""
    number = BATCHES_PER_SLOT * sum(model.slots for model in models) if batches is None else batches
    made: list[RequestBatch] = []
    dealt = [0.0] * len(models)
    first = 0
    for batch in range(number):
        route = _next_route(models, dealt)
        model = models[route]
        tokens = planned_tokens(model) if output_tokens is None else output_tokens
        requests = tuple(Arrival(first + row, 0.0, tokens) for row in range(model.batch))
        made.append(_batch(batch, route, model, requests))
        first += model.batch
    return made


def workload_batches(
    models: Sequence[RouteModel], arrivals: Sequence[Arrival], output_tokens: int | None
) -> list[RequestBatch]:
    """Requests in order of arrival, as many together as the route's batch; a batch enters with its last one."""
    made: list[RequestBatch] = []
    dealt = [0.0] * len(models)
    first = 0
    while first < len(arrivals):
        route = _next_route(models, dealt)
        model = models[route]
        requests = tuple(
            Arrival(item.request, item.arrival_us, output_tokens or item.output_tokens)
            for item in arrivals[first : first + model.batch]
        )
        made.append(_batch(len(made), route, model, requests))
        first += len(requests)
    return made


def check_requests(
    trace: Trace, models: Sequence[RouteModel], batches: Sequence[RequestBatch], seed: int
) -> None:
    """Raise :class:`GuardError` for the first request that the trace is not valid for. ``seed``: of the prompts."""
    for programs, tokens in _lengths(trace, models, batches):
        check_lengths(programs, tokens)
    for batch in batches:
        _check_prompts(trace, models[batch.plan.route], batch, seed)


def beyond_trace(trace: Trace, models: Sequence[RouteModel], batches: Sequence[RequestBatch]) -> str | None:
    """What a simulation's reader must know of requests whose lengths the trace is not valid for; None if none is.

    See :func:`tessera_core.program.guards.beyond_lengths`.
    """
    found = (beyond_lengths(programs, tokens) for programs, tokens in _lengths(trace, models, batches))
    return next((text for text in found if text), None)


def _lengths(
    trace: Trace, models: Sequence[RouteModel], batches: Sequence[RequestBatch]
) -> list[tuple[list[Program], int]]:
    """Programs of a route and the tokens that its requests generate, each combination once."""
    lengths = []
    for route, iterations in dict.fromkeys((batch.plan.route, batch.plan.iterations) for batch in batches):
        programs = [trace.program(program.name) for program in models[route].programs]
        lengths.append((programs, iterations[-1] + (1 if len(programs) > 1 else 0)))
    return lengths


def _check_prompts(trace: Trace, model: RouteModel, batch: RequestBatch, seed: int) -> None:
    """Check the guards on inputs, which are drawn only where there are such guards."""
    programs = [trace.program(program.name) for program in model.programs]
    guarded = [program for program in programs if guarded_inputs(program)]
    if not guarded:
        return
    # Here and not above: it needs PyTorch, which a simulation does without.
    from tessera_core.program.weights import guarded_prompts

    last = batch.first + batch.count - 1
    rows = [min(batch.first + row, last) for row in range(model.batch)]
    repeated = len(programs) > 1 or batch.plan.iterations[0] > 1
    for program in guarded:
        feeding = programs if program is programs[-1] and repeated else []
        for prompts in guarded_prompts(trace, program, seed, rows, feeding):
            check_guards(program, inputs=prompts)


def _next_route(models: Sequence[RouteModel], dealt: list[float]) -> int:
    """The route that is furthest behind its share of requests once it takes a batch."""
    shares = [model.share for model in models]
    if not any(shares):
        raise InputError("plan: no route has a share of the requests; run tessera partition again")
    route = min(
        (index for index, share in enumerate(shares) if share > 0),
        key=lambda index: ((dealt[index] + models[index].batch) / shares[index], index),
    )
    dealt[route] += models[route].batch
    return route


def _batch(batch: int, route: int, model: RouteModel, requests: tuple[Arrival, ...]) -> RequestBatch:
    tokens = max(item.output_tokens for item in requests)
    earlier = tuple(program.rate for program in model.programs[:-1])
    return RequestBatch(
        plan=BatchPlan(
            batch=batch,
            route=route,
            arrival_us=max(item.arrival_us for item in requests),
            iterations=(*earlier, tokens - 1 if earlier else tokens),
        ),
        first=requests[0].request,
        requests=requests,
    )
