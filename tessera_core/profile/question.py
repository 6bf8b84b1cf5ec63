"""What a profile is asked about: the kernels of one trace, each structure once, and the catalogue that applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tessera_core.profile.catalogue import Catalogue
from tessera_core.profile.model.collective import Collective, collectives
from tessera_core.profile.operators import work_of
from tessera_core.profile.work import Work
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_formats.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A trace in the terms of profiles. ``kernels`` and ``works``: by signature, in program order.

    ``bundle``: the trace as it is stored, with what was recorded of it. ``joins``: collectives, by signature; they are
    always modelled, because a kernel measured on one device never meets the other ranks.
    """

    trace: Trace
    bundle: Bundle
    kernels: Mapping[str, Kernel]
    works: Mapping[str, Work]
    joins: Mapping[str, Collective]
    catalogue: Catalogue

    @staticmethod
    def of(trace: Trace, bundle: Bundle, catalogue: Catalogue) -> Question:
        """Everything that is to be known of ``trace``, with one kernel of each signature."""
        found = _first_of_each(trace)
        return Question(
            trace=trace,
            bundle=bundle,
            kernels={signature: kernel for signature, (_, kernel) in found.items()},
            works={
                signature: work_of(trace, program, kernel) for signature, (program, kernel) in found.items()
            },
            joins=collectives(trace),
            catalogue=catalogue,
        )

    def only(self, signature: str) -> Question:
        """The same question about one kernel."""
        return replace(
            self,
            kernels={signature: self.kernels[signature]},
            works={signature: self.works[signature]},
            joins={key: join for key, join in self.joins.items() if key == signature},
        )


def _first_of_each(trace: Trace) -> dict[str, tuple[Program, Kernel]]:
    found: dict[str, tuple[Program, Kernel]] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            found.setdefault(kernel.signature, (program, kernel))
    return found
