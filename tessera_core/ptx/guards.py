"""What the conditions on the way to a step say about registers there: comparisons that surely hold, found once per
kernel from the control flow alone.

Only registers that are as good as in static single assignment are looked at: all that sets one stands in one basic
block, and the last of it dominates every use. Then, whatever loops and joins lie between, the contents that a use
sees are those that any other use dominated by it saw last: were there a path from the definition to the one use
around the other, so would there be one from the entry. A register that is set anywhere else tells nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from tessera_core.ptx.flow import Flow, block_starts, leaves_block
from tessera_core.ptx.kernel import Kernel
from tessera_core.ptx.syntax import Name, Negated, Operand, Pair
from tessera_core.ptx.values import width_of

# Conditions of one step that are looked at.
_CONDITIONS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Condition:
    """At step ``at`` the predicate ``register`` is true, or false where not ``holds``."""

    register: str
    holds: bool
    at: int


@dataclass(frozen=True, slots=True)
class Facts:
    """``truths``: predicates that are known, by name. ``comparisons``: the `setp` steps among what defines them,
    and whether the comparison of their first two sources holds."""

    truths: dict[str, bool]
    comparisons: tuple[tuple[int, bool], ...]


class Guards:
    """Conditions and definitions of one kernel's flow."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._indices = {id(step): index for index, step in enumerate(flow.steps)}
        self._starts = block_starts(flow.steps)
        # For every basic block an item per edge into it from where threads can be: the block that it comes from, and
        # what holds on it.
        self._sources: list[list[int]] = [[] for _ in self._starts]
        self._entered: list[list[Condition | None]] = [[] for _ in self._starts]
        self._connect()
        self._dominators = self._dominated()
        self._definitions = self._defined()
        self._facts: dict[tuple[Condition, ...], Facts] = {}
        self._conditions: dict[int, tuple[Condition, ...]] = {}

    def index(self, step: object) -> int:
        """Index of one of the flow's own steps."""
        return self._indices[id(step)]

    def fixed(self, register: str, at: int) -> bool:
        """Whether step ``at`` reads what every later step that it dominates reads: a name that nothing sets, or
        one whose definition is known."""
        return register not in self._definitions or self.definition(register, at) is not None

    def definition(self, register: str, at: int) -> int | None:
        """The last step that sets ``register`` before step ``at``, where that is the same step on every path."""
        place = self._definitions.get(register)
        return place if place is not None and self._before(place, at) else None

    def conditions(self, at: int) -> tuple[Condition, ...]:
        """What holds whenever a thread executes step ``at``: its own guard, and the branches on every way there."""
        if at not in self._conditions:
            found: list[Condition] = []
            guard = self.flow.steps[at].guard
            if guard is not None:
                found.append(Condition(guard.register, not guard.negated, at))
            block = self._block(at)
            for start, entered in enumerate(self._entered):
                if self._dominators[block] >> start & 1 and len(entered) == 1 and entered[0] is not None:
                    found.append(entered[0])
            self._conditions[at] = tuple(found[:_CONDITIONS_LIMIT])
        return self._conditions[at]

    def facts(self, conditions: tuple[Condition, ...]) -> Facts:
        """What follows from conditions that hold together."""
        if conditions not in self._facts:
            self._facts[conditions] = self._expanded(conditions)
        return self._facts[conditions]

    # --- consequences -------------------------------------------------------------------------------------------

    def _expanded(self, conditions: tuple[Condition, ...]) -> Facts:
        truths: dict[str, bool] = {}
        comparisons: list[tuple[int, bool]] = []
        queue = list(conditions)
        while queue:
            condition = queue.pop()
            place = self.definition(condition.register, condition.at)
            if place is None or condition.register in truths:
                continue
            truths[condition.register] = condition.holds
            step = self.flow.steps[place]
            if step.guard is not None:
                continue  # it may hold what it held before
            parts, sources = step.parts, step.operands[1:]
            if parts[0] == "setp":
                self._compared(place, condition, queue, comparisons)
            elif parts[-1] != "pred":
                continue
            elif parts[0] in ("mov", "not") and len(sources) == 1:
                self._follow(sources[0], condition.holds == (parts[0] == "mov"), place, queue)
            elif parts[0] == ("and" if condition.holds else "or"):
                for source in sources:
                    self._follow(source, condition.holds, place, queue)
        return Facts(truths, tuple(comparisons))

    def _compared(
        self, place: int, condition: Condition, queue: list[Condition], comparisons: list[tuple[int, bool]]
    ) -> None:
        step = self.flow.steps[place]
        target, sources, holds = step.operands[0], step.operands[1:], condition.holds
        if isinstance(target, Pair):
            names = [part.text for part in (target.first, target.second) if isinstance(part, Name)]
            if names.count(condition.register) != 1 or len(sources) != 2:
                return
            holds = holds == (isinstance(target.first, Name) and target.first.text == condition.register)
        if len(sources) == 3:
            if ("and" if holds else "or") not in step.parts[2:-1]:
                return
            self._follow(sources[2], holds, place, queue)
        if len(sources) in (2, 3) and width_of(step.parts[-1]):
            comparisons.append((place, holds))

    @staticmethod
    def _follow(source: Operand, holds: bool, at: int, queue: list[Condition]) -> None:
        if isinstance(source, Negated):
            source, holds = source.operand, not holds
        if isinstance(source, Name):
            queue.append(Condition(source.text, holds, at))

    # --- control flow -------------------------------------------------------------------------------------------

    def _block(self, step: int) -> int:
        return bisect_right(self._starts, step) - 1

    def _connect(self) -> None:
        steps = self.flow.steps
        self._entered[0].append(None)  # the launch itself, which comes from no block
        queue, seen = [0] if steps else [], {0}
        while queue:
            block = queue.pop()
            end = self._starts[block + 1] if block + 1 < len(self._starts) else len(steps)
            step = steps[end - 1]
            guard = step.guard
            after: list[tuple[int, Condition | None]] = []
            for target in step.targets:
                taken = None if guard is None else Condition(guard.register, not guard.negated, end - 1)
                after.append((target, taken))
            if guard is not None or not (step.targets or step.ends):
                left = (
                    Condition(guard.register, guard.negated, end - 1)
                    if guard and leaves_block(step)
                    else None
                )
                after.append((end, left))
            for target, condition in after:
                if target >= len(steps):
                    continue
                to = self._block(target)
                self._entered[to].append(condition)
                self._sources[to].append(block)
                if to not in seen:
                    seen.add(to)
                    queue.append(to)

    def _dominated(self) -> list[int]:
        """Dominators of every block, as bit masks; an unreachable block has itself alone."""
        everything = (1 << len(self._starts)) - 1
        found = [everything if entered else 1 << block for block, entered in enumerate(self._entered)]
        found[0] = 1
        changed = True
        while changed:
            changed = False
            for block in range(1, len(self._starts)):
                common = everything
                for source in self._sources[block]:
                    common &= found[source]
                if self._sources[block] and common | 1 << block != found[block]:
                    found[block] = common | 1 << block
                    changed = True
        return found

    def _defined(self) -> dict[str, int | None]:
        """For every register that is set the last step that does, None where several blocks set it."""
        found: dict[str, int | None] = {}
        for index, step in enumerate(self.flow.steps):
            for name in step.writes:
                before = found.get(name, index)
                same = before is not None and self._block(before) == self._block(index)
                found[name] = index if same else None
        return found

    def _before(self, first: int, second: int) -> bool:
        """Whether every way to step ``second`` goes through step ``first``."""
        source, target = self._block(first), self._block(second)
        if source == target:
            return first < second
        return bool(self._dominators[target] >> source & 1)


@lru_cache(maxsize=256)
def guards_of(kernel: Kernel) -> Guards:
    """The guards of a kernel, shared by its launches."""
    return Guards(kernel.flow)
