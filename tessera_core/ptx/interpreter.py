"""Abstract interpretation of one launch: all threads of a group of blocks step through the kernel together, each
with its own numbers (`values.py`), under masks that say which threads can be at a step and which must be.

Control flow. Of the places where threads wait, the first in program order runs next, so that paths meet again as
early as possible. A branch whose predicate is known splits the masks; one that depends on data sends every thread
both ways: it *can* be on either path and *must* be on neither, registers written there keep their old value as a
possibility, and only where the paths surely meet again (immediate post-dominator) do the threads count as present.
Loops with known trip counts are simply run. Loops that depend on data are repeated until nothing changes, widening
what still moves; so are loops that exceed the step budget.

Soundness: at every step the true set of threads lies between the two masks and every register's true value is
among its abstract ones, so recorded accesses contain the real ones and sure accesses really happen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera_core.ptx.execution import Threads
from tessera_core.ptx.flow import Step
from tessera_core.ptx.footprint import Footprint
from tessera_core.ptx.kernel import Kernel
from tessera_core.ptx.parameters import LaunchShape
from tessera_core.ptx.predicates import both, either, invert, same_mask
from tessera_core.ptx.values import ALWAYS, EITHER, NEVER, Bool, Int, Predicate

# Concrete steps per group of blocks before loops are widened instead of run, and steps from then on before the
# analysis gives up: a second or two each.
STEPS_LIMIT = 100_000

# Numbers that a step may work on at the price of one; every further as many cost one step more.
NUMBERS_PER_STEP = 4096

# Rounds of a data-dependent loop before what still moves is widened.
ROUNDS_BEFORE_WIDENING = 2


@dataclass(slots=True)
class _Waiting:
    """Threads that wait at a position."""

    can: Bool
    must: Bool


class Interpreter:
    """Runs one group of blocks and fills a footprint. ``blocks`` are linear block indices, or None for a summary
    over all blocks, in which block indices are intervals. ``steps``: what may be spent on it before loops are
    widened."""

    def __init__(
        self, kernel: Kernel, launch: LaunchShape, blocks: Int | None, steps: int | None = None
    ) -> None:
        self.kernel = kernel
        self.flow = kernel.flow
        self.threads = Threads(kernel, launch, blocks)
        self.shape = self.threads.shape
        self.waiting: dict[int, _Waiting] = {}
        self.joins: list[tuple[int, Bool]] = []
        self.allowed = STEPS_LIMIT if steps is None else min(steps, STEPS_LIMIT)
        self.steps_left = self.allowed
        self.rounds: dict[int, int] = {}
        self.seen: dict[int, tuple[int, Bool]] = {}
        self.doomed = kernel.doomed_positions()

    def run(self) -> Footprint:
        """Interpret from the first step until no thread waits anywhere."""
        self._wait(0, ALWAYS, ALWAYS)
        while self.waiting:
            position = min(self.waiting)
            if self.steps_left < -STEPS_LIMIT:
                self.threads.memory.give_up(
                    self.flow.steps[self.flow.runs[min(position, len(self.flow.runs) - 1)]]
                )
                break
            threads = self.waiting.pop(position)
            if position < len(self.flow.runs):
                self._walk(position, threads.can, threads.must)
        return self.threads.memory.finished()

    @property
    def spent(self) -> int:
        """Steps so far, large ones counted as several."""
        return self.allowed - self.steps_left

    def _wait(self, position: int, can: Bool, must: Bool) -> None:
        if not can.any():
            return
        present = self.waiting.get(position)
        if present is None:
            self.waiting[position] = _Waiting(can, must)
        else:
            present.can = either(self.shape, present.can, can)
            present.must = either(self.shape, present.must, must)

    def _walk(self, position: int, can: Bool, must: Bool) -> None:
        """Step on from ``position`` until a branch, the end, or a place where other threads wait."""
        must = self._restore(position, must)
        runs, steps = self.flow.runs, self.flow.steps
        together = bool(can.all() and must.all())
        while position < len(runs):
            step = steps[runs[position]]
            self.steps_left -= 1
            taken_can, taken_must, left_can, left_must = self._guarded(step, can, must)
            if step.targets or step.ends:
                self._leave(position, step, (taken_can, taken_must), (left_can, left_must), must)
                return
            if taken_can.any():
                self.threads.execute(step, taken_can, taken_must, together)
                self.steps_left -= self.threads.handled // NUMBERS_PER_STEP
                self.threads.handled = 0
                if step.effects.reaches_all:
                    if step.parts[0] in ("bra", "brx"):
                        return
                    must, together = left_must, False  # a callee may not come back
            position += 1
            if position in self.waiting or any(place == position for place, _ in self.joins):
                self._wait(position, can, must)
                return

    def _restore(self, position: int, must: Bool) -> Bool:
        """Threads whose diverging paths surely meet here are here again, unless some may still be on their way."""
        due = [mask for place, mask in self.joins if place == position]
        if not due:
            return must
        self.joins = [(place, mask) for place, mask in self.joins if place != position]
        for mask in due:
            if not any(
                both(self.shape, mask, threads.can).any()
                for place, threads in self.waiting.items()
                if place not in self.doomed  # a launch whose threads go there has no result to be wrong about
            ):
                must = either(self.shape, must, mask)
        return must

    def _guarded(self, step: Step, can: Bool, must: Bool) -> tuple[Bool, Bool, Bool, Bool]:
        """Masks of the threads that execute the step and of those that pass it by."""
        if step.guard is None and step.parts[0] != "brx":
            return can, must, NEVER, NEVER
        predicate: Predicate = EITHER
        if step.guard is not None and not (self.steps_left < 0 and step.targets):
            predicate = self.threads.predicate(step.guard.register)
        true, false = predicate.true, predicate.false
        if step.guard is not None and step.guard.negated:
            true, false = false, true
        return (
            both(self.shape, can, true),
            both(self.shape, must, invert(false)),
            both(self.shape, can, false),
            both(self.shape, must, invert(true)),
        )

    def _leave(
        self, position: int, step: Step, taken: tuple[Bool, Bool], left: tuple[Bool, Bool], must: Bool
    ) -> None:
        """Send threads on from a branch or an end."""
        uncertain = both(self.shape, taken[0], left[0]) if len(step.targets) < 2 else taken[0]
        lost = both(self.shape, must, uncertain)
        if lost.any():
            self.joins.append((self.kernel.join(position), lost))
        if step.guard is not None:
            self._wait(position + 1, *left)
        certain = taken[1] if len(step.targets) == 1 else NEVER
        places = [self.kernel.position(target) for target in step.targets]
        # decided once for all ways back of one branch: following the first would make the second look seen
        back = any(place <= position for place in places) and self._again(position, taken[0], certain)
        for place in places:
            if place > position or back:
                self._wait(place, taken[0], certain)

    def _again(self, position: int, can: Bool, must: Bool) -> bool:
        """Whether a jump back is worth following: always for sure threads, else while something still changes."""
        if not can.any():
            return False
        if self.steps_left >= 0 and same_mask(can, must):
            return True
        self.rounds[position] = self.rounds.get(position, 0) + 1
        if self.rounds[position] > ROUNDS_BEFORE_WIDENING:
            self.threads.widen = self.threads.memory.shared.widen = True
        now = self.threads.version + self.threads.memory.version
        version, threads = self.seen.get(position, (-1, NEVER))
        if version == now and not both(self.shape, can, invert(threads)).any():
            return False
        self.seen[position] = (now, either(self.shape, threads, can))
        return True
