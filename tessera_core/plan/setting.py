"""What every strategy starts from: inputs, policy and limits, and the ways to make a route of the traced
programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tessera_core.plan.cluster import Device
from tessera_core.plan.matrix import Goal
from tessera_core.plan.needs import ProgramNeeds, program_needs
from tessera_core.plan.placement import Cost
from tessera_core.plan.predict import Origin
from tessera_core.plan.problem import Problem, build_problem
from tessera_core.profile.times import Condition
from tessera_core.program.ir import Program
from tessera_formats.errors import InputError

DEFAULT_OUTPUT_TOKENS = 32
"""Tokens that a request is planned to generate where neither the user nor the cache's room says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Programs that a route may use, in phase order, with their rates per batch of requests."""

    needs: tuple[ProgramNeeds, ...]
    rates: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Requests in a batch: of the last phase's program."""
        return self.needs[-1].program.batch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all strategies share: inputs, policy and limits."""

    origin: Origin
    in_flight: int | None
    output_tokens: int | None

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Every way to make a route of the traced programs; raises :class:`InputError` where there is none."""
        return route_choices(self.origin, self.output_tokens)

    @property
    def goal(self) -> Goal:
        """What the solver minimises."""
        return "latency" if self.origin.policy == "latency" else "interval"

    def condition(self, devices: int, copies: bool = False) -> Condition:
        """Under which condition kernels run that are spread over so many devices, or of which each has a copy.

        Alone, unless several devices work at once; for latency, where one batch passes through, none do. A profile
        that lacks the condition gives the nearest that it has: slices of a GPU are measured beside copies alone, so
        placements over them are weighed by those times as well.
        """
        if devices < 2 or self.goal == "latency":
            return "alone"
        return "copies" if copies else "beside"

    def problem(self, choice: Choice, devices: Sequence[Device], slots: int, condition: Condition) -> Problem:
        """The cost model of a choice on some devices."""
        return build_problem(
            trace=self.origin.trace,
            needs=choice.needs,
            rates=choice.rates,
            slots=slots,
            cluster=self.origin.cluster,
            devices=devices,
            times=self.origin.times,
            condition=condition,
        )

    def merit(self, problem: Problem, figures: Cost) -> float:
        """Larger is better: tokens a microsecond, or for latency one over a batch's serial time."""
        if self.goal == "latency":
            return 1 / max(figures.latency_us(problem.rates), 1e-9)
        tokens = 1 if len(problem.programs) == 1 else 1 + problem.rates[-1]
        return problem.programs[-1].batch * tokens / max(figures.interval_us(problem.slots), 1e-9)


def usual_tokens(prefill: Program, decode: Program) -> int:
    """Tokens that a request is planned to generate where the user doesn't say: what the cache holds beside the
    prompt, up to :data:`DEFAULT_OUTPUT_TOKENS`; that many too where it holds none, since such a trace is for
    planning alone.
    """
    room = decode.context - prefill.context + 1  # the last token is generated, but never cached
    return min(room, DEFAULT_OUTPUT_TOKENS) if room > 1 else DEFAULT_OUTPUT_TOKENS


def route_choices(origin: Origin, output_tokens: int | None) -> tuple[Choice, ...]:
    """Pairs of prefill and decode programs that fit together, or single programs of the only phase.

    ``output_tokens``: tokens that each request generates; None: :func:`usual_tokens`. Of several contexts of a
    phase the largest is used: other contexts are other work, not other plans.
    """
    by_phase: dict[str, list[Program]] = {}
    for program in origin.trace.programs:
        by_phase.setdefault(program.phase, []).append(program)
    largest = {
        phase: [p for p in programs if p.context == max(other.context for other in programs)]
        for phase, programs in by_phase.items()
    }
    needs = {
        program.id: program_needs(origin.trace, origin.deps, program)
        for programs in largest.values()
        for program in programs
    }
    if len(largest) == 1:
        (programs,) = largest.values()
        return tuple(Choice(needs=(needs[program.id],), rates=(1,)) for program in programs)
    if set(largest) != {"prefill", "decode"}:
        raise InputError(
            f"trace: holds programs of phases {', '.join(sorted(largest))}, which no route joins;"
            " trace one phase alone, or prefill and decode"
        )
    pairs = tuple(
        Choice(
            needs=(needs[prefill.id], needs[decode.id]),
            rates=(decode.batch // prefill.batch, (output_tokens or usual_tokens(prefill, decode)) - 1),
        )
        for decode in largest["decode"]
        for prefill in largest["prefill"]
        if decode.batch % prefill.batch == 0 and prefill.context <= decode.context
    )
    if not pairs:
        raise InputError(
            "trace: no prefill program fits a decode program (its batch must divide decode's, its context must"
            " not exceed decode's); trace both with fitting sizes"
        )
    return pairs
