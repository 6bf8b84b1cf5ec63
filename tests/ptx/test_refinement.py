"""Indices that are loaded, checked and used: the checked range is claimed, no more, and never less than what threads
touch when something else gets in between."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tessera_core.program.boxes import Box
from tessera_core.ptx.analysis import LaunchAnalysis, analyse_launch
from tests.ptx.emulator import Observation, observe
from tests.ptx.launches import Pointer, launch_of
from tests.ptx.test_control_flow import analyse, kernel, only

N = 10
LOAD = "ld.global.u32 %r2, [%rd4];"
LOAD_64 = "ld.global.u64 %rd8, [%rd4];"
PLACE = "mul.wide.s32 %rd6, %r2, 4; add.s64 %rd7, %rd2, %rd6;"
STORE = "st.global.u32 [%rd7], %r1;"
ALL = (Box(0, (), 4 * N),)


def written(body: str) -> tuple[Box, ...] | None:
    (write,) = only(analyse(kernel(body), N), 1, "write")
    assert not write.must and write.precision == "bounded"
    return write.boxes


@pytest.mark.parametrize(
    ("body", "boxes"),
    [
        # a branch around, with both halves of the check in one unsigned comparison
        (f"{LOAD} setp.ge.u32 %p1, %r2, %r9; @%p1 bra $E; {PLACE} {STORE} $E: ret;", ALL),
        # the address is computed before the check
        (f"{LOAD} {PLACE} setp.ge.u32 %p1, %r2, %r9; @%p1 bra $E; {STORE} $E: ret;", ALL),
        # the branch is taken where the check holds
        (f"{LOAD} {PLACE} setp.lt.u32 %p1, %r2, %r9; @%p1 bra $D; bra.uni $E; $D: {STORE} $E: ret;", ALL),
        # threads whose check fails leave
        (f"{LOAD} {PLACE} setp.lt.u32 %p1, %r2, %r9; @!%p1 exit; {STORE} ret;", ALL),
        (f"{LOAD} {PLACE} setp.gt.u32 %p1, %r9, %r2; @!%p1 bra $E; {STORE} $E: ret;", ALL),
        # predicates joined
        (
            f"{LOAD} setp.lt.s32 %p1, %r2, 0; setp.ge.s32 %p2, %r2, %r9; or.pred %p3, %p1, %p2;"
            f" @%p3 bra $E; {PLACE} {STORE} $E: ret;",
            ALL,
        ),
        (
            f"{LOAD} {PLACE} setp.gt.s32 %p1, %r2, -1; setp.lt.s32 %p2, %r2, %r9; and.pred %p3, %p1, %p2;"
            f" @%p3 {STORE} ret;",
            ALL,
        ),
        (
            f"{LOAD} {PLACE} setp.gt.s32 %p1, %r2, -1; setp.lt.and.s32 %p2, %r2, %r9, %p1; not.pred %p3, %p2;"
            f" @!%p3 {STORE} ret;",
            ALL,
        ),
        (
            f"{LOAD} {PLACE} setp.lt.s32 %p1, %r2, 0; setp.ge.or.s32 %p2, %r2, %r9, %p1; @!%p2 {STORE} ret;",
            ALL,
        ),
        (f"{LOAD} {PLACE} setp.lt.u32 %p1|%p2, %r2, %r9; @!%p2 {STORE} ret;", ALL),
        # half a check: what lies before an allocation is never touched
        (f"{LOAD} setp.lt.s32 %p1, %r2, %r9; {PLACE} @%p1 {STORE} ret;", ALL),
        # two branches, one after the other
        (
            f"{LOAD} setp.lt.s32 %p1, %r2, 0; @%p1 bra $E; setp.ge.s32 %p2, %r2, %r9; @%p2 bra $E;"
            f" {PLACE} {STORE} $E: ret;",
            ALL,
        ),
        # a load under a mask, as Triton writes it: zero where the mask is off
        (
            f"mov.u32 %r2, 0; setp.lt.s32 %p4, %r1, 20; @%p4 {LOAD} setp.gt.s32 %p1, %r2, -1;"
            f" setp.lt.s32 %p2, %r2, %r9; and.pred %p3, %p1, %p2; and.pred %p5, %p3, %p4; {PLACE} @%p5 {STORE} ret;",
            ALL,
        ),
        # wide indices, and indices checked after they were extended
        (
            f"{LOAD_64} setp.lt.s64 %p1, %rd8, {N}; setp.ge.and.s64 %p2, %rd8, 0, %p1; shl.b64 %rd6, %rd8, 2;"
            f" add.s64 %rd7, %rd2, %rd6; @%p2 {STORE} ret;",
            ALL,
        ),
        (f"{LOAD} cvt.s64.s32 %rd8, %r2; setp.lt.u64 %p1, %rd8, {N}; {PLACE} @%p1 {STORE} ret;", ALL),
        # an index counted from one, checked with a wrapping subtraction
        (
            f"{LOAD} add.s32 %r3, %r2, -1; setp.lt.u32 %p1, %r3, %r9; {PLACE} @%p1 {STORE} ret;",
            (Box(4, (), 4 * N),),
        ),
        (
            f"{LOAD} sub.s32 %r3, 5, %r2; setp.lt.u32 %p1, %r3, 3; {PLACE} @%p1 {STORE} ret;",
            (Box(12, (), 12),),
        ),
        # a negative index counts from the end; out of bounds is an assertion
        (
            f"{LOAD_64} setp.lt.s64 %p1, %rd8, 0; add.s64 %rd9, %rd8, {N}; selp.b64 %rd10, %rd9, %rd8, %p1;"
            f" setp.lt.u64 %p2, %rd10, {N}; @%p2 bra $O; trap; $O: shl.b64 %rd6, %rd10, 2;"
            f" add.s64 %rd7, %rd2, %rd6; {STORE} ret;",
            ALL,
        ),
        # clamped by selection, and by min and max
        (
            f"{LOAD} setp.lt.u32 %p1, %r2, %r9; selp.b32 %r3, %r2, 0, %p1; mul.wide.s32 %rd6, %r3, 4;"
            f" add.s64 %rd7, %rd2, %rd6; {STORE} ret;",
            ALL,
        ),
        (
            f"{LOAD} max.s32 %r3, %r2, 0; min.s32 %r4, %r3, 9; mul.wide.s32 %rd6, %r4, 4;"
            f" add.s64 %rd7, %rd2, %rd6; {STORE} ret;",
            ALL,
        ),
        (
            f"{LOAD_64} max.s64 %rd9, %rd8, 0; min.s64 %rd10, %rd9, 9; shl.b64 %rd6, %rd10, 2;"
            f" add.s64 %rd7, %rd2, %rd6; {STORE} ret;",
            ALL,
        ),
        # the other source of a selected address is no address
        (
            f"{LOAD} setp.lt.u32 %p1, %r2, %r9; {PLACE} selp.b64 %rd9, %rd7, 0, %p1;"
            " @%p1 st.global.u32 [%rd9], %r1; ret;",
            ALL,
        ),
        # in a loop whose end is in memory, each time checked anew
        (
            f"mov.u32 %r4, 0; $L: {LOAD} setp.ge.u32 %p1, %r2, %r9; @%p1 bra $N; {PLACE} {STORE}"
            f" $N: add.s32 %r4, %r4, 1; ld.global.u32 %r5, [%rd1]; setp.lt.s32 %p2, %r4, %r5; @%p2 bra $L; ret;",
            ALL,
        ),
        # within another branch that depends on data
        (
            f"ld.global.u32 %r5, [%rd1]; setp.eq.s32 %p2, %r5, 0; @%p2 bra $E; {LOAD}"
            f" setp.ge.u32 %p1, %r2, %r9; @%p1 bra $E; {PLACE} {STORE} $E: ret;",
            ALL,
        ),
    ],
)
def test_a_checked_index_touches_the_checked_range(body: str, boxes: tuple[Box, ...]) -> None:
    assert written(body) == boxes


CHECK = f"{LOAD} setp.lt.u32 %p1, %r2, %r9;"


@pytest.mark.parametrize(
    "body",
    [
        # set anew between the check and the use
        f"{CHECK} ld.global.u32 %r2, [%rd4+128]; {PLACE} @%p1 {STORE} ret;",
        f"{CHECK} @!%p1 bra $E; ld.global.u32 %r2, [%rd4+128]; {PLACE} {STORE} $E: ret;",
        f"{CHECK} {PLACE} @%p1 add.s64 %rd7, %rd7, %rd3; ld.global.u64 %rd6, [%rd4];"
        f" add.s64 %rd7, %rd2, %rd6; @%p1 {STORE} ret;",
        f"{CHECK} @%p2 ld.global.u32 %r2, [%rd4+128]; {PLACE} @%p1 {STORE} ret;",
        f"bra.uni $X; $A: ld.global.u32 %r2, [%rd4+128]; bra.uni $J; $X: {CHECK} ld.global.u32 %r3, [%rd1];"
        f" setp.eq.s32 %p2, %r3, 0; @%p2 bra $A; $J: {PLACE} @%p1 {STORE} ret;",
        # where the branches have met again
        f"{CHECK} {PLACE} @%p1 bra $J; add.s32 %r3, %r1, 1; $J: {STORE} ret;",
        f"{CHECK} {PLACE} @%p1 bra $J; $J: {STORE} ret;",
        # another way in
        f"{CHECK} {PLACE} ld.global.u32 %r3, [%rd1]; setp.eq.s32 %p2, %r3, 0; @%p2 bra $D; @!%p1 bra $E;"
        f" $D: {STORE} $E: ret;",
        # the index of the next round, after that of this round was checked
        f"{LOAD} $L: setp.ge.u32 %p1, %r2, %r9; @%p1 bra $E; ld.global.u32 %r2, [%rd4+128]; {PLACE} {STORE}"
        " bra $L; $E: ret;",
        # the check of the last round
        f"setp.eq.s32 %p1, %r1, 40; $L: {LOAD} {PLACE} @%p1 {STORE} setp.lt.u32 %p1, %r2, %r9;"
        " ld.global.u32 %r3, [%rd1]; setp.eq.s32 %p2, %r3, 0; @%p2 bra $L; ret;",
        # a check that may be skipped leaves the predicate what it was
        f"{LOAD} {PLACE} setp.lt.s32 %p1, %r1, 32; ld.global.u32 %r3, [%rd1]; setp.eq.s32 %p2, %r3, 0;"
        f" @%p2 setp.lt.u32 %p1, %r2, %r9; @%p1 {STORE} ret;",
        # the wrong half of a check says nothing
        f"{CHECK} {PLACE} @!%p1 {STORE} ret;",
        f"{LOAD} setp.lt.s32 %p1, %r2, %r9; setp.ge.s32 %p2, %r2, 0; or.pred %p3, %p1, %p2; {PLACE} @%p3 {STORE} ret;",
        f"{LOAD} setp.lt.s32 %p1, %r2, %r9; setp.ge.xor.s32 %p2, %r2, 0, %p1; {PLACE} @%p2 {STORE} ret;",
        # the check is of the low bits
        f"{LOAD_64} cvt.u32.u64 %r2, %rd8; setp.lt.u32 %p1, %r2, %r9; shl.b64 %rd6, %rd8, 2;"
        f" add.s64 %rd7, %rd2, %rd6; @%p1 {STORE} ret;",
        # the sum that is checked may have wrapped
        f"{LOAD} add.s32 %r3, %r2, 0x40000000; setp.lt.s32 %p1, %r3, %r9; {PLACE} @%p1 {STORE} ret;",
        # the limit itself is not known
        f"{LOAD} ld.global.u32 %r3, [%rd1]; setp.lt.u32 %p1, %r2, %r3; {PLACE} @%p1 {STORE} ret;",
    ],
)
def test_what_is_not_checked_is_not_narrowed(body: str) -> None:
    boxes = written(body)
    assert boxes is None or boxes[-1].high > 4 * N or boxes[0].low < 0


# nvcc 13.0 -arch=sm_90 -ptx, lines that compute floating-point numbers left out, of
#   long i = index[threadIdx.x]; if (i < 0) i += n; if (i < 0 || i >= n) __trap(); table[i] = 2.0f;
COMPILED_WRAP = """
    ld.global.u64 %rd8, [%rd4]; cvt.s64.s32 %rd14, %r9; shr.s64 %rd9, %rd8, 63; and.b64 %rd10, %rd9, %rd14;
    add.s64 %rd11, %rd10, %rd8; setp.gt.s64 %p1, %rd11, -1; setp.lt.s64 %p2, %rd11, %rd14; and.pred %p3, %p1, %p2;
    @%p3 bra $L; trap;
    $L: shl.b64 %rd12, %rd11, 2; add.s64 %rd13, %rd2, %rd12; st.global.u32 [%rd13], %r1; ret;
"""
# ... and of
#   int m = index[0];
#   for (int j = 0; j < m; j++) { int i = index[threadIdx.x + 32 * j] - 1; if (i >= 0 && i < n) table[i] = j; }
COMPILED_LOOP = """
    ld.global.u32 %r10, [%rd1]; setp.lt.s32 %p1, %r10, 1; @%p1 bra $END;
    and.b32 %r7, %r10, 3; mov.u32 %r4, 0; mov.u32 %r5, %r1;
    $L: mul.wide.u32 %rd8, %r5, 4; add.s64 %rd9, %rd1, %rd8; ld.global.u32 %r11, [%rd9];
    setp.lt.s32 %p3, %r11, 1; setp.gt.s32 %p4, %r11, %r9; or.pred %p5, %p3, %p4; @%p5 bra $NEXT;
    add.s32 %r12, %r11, -1; mul.wide.s32 %rd10, %r12, 4; add.s64 %rd11, %rd2, %rd10; st.global.u32 [%rd11], %r4;
    $NEXT: add.s32 %r4, %r4, 1; add.s32 %r5, %r5, 32; add.s32 %r7, %r7, -1; setp.ne.s32 %p6, %r7, 0; @%p6 bra $L;
    $END: ret;
"""


@pytest.mark.parametrize("body", [COMPILED_WRAP, COMPILED_LOOP])
def test_checks_as_nvcc_compiles_them(body: str) -> None:
    assert written(body) == ALL


# --- random programs ----------------------------------------------------------------------------------------------

MIDDLE = 1 << 35  # of a buffer so large that no index leaves it
CORNERS = (0, 1, 2, 5, 9, 10, 11, 31, 255, -1, -2, -5, 0x7FFFFFFF, -0x80000000, 0x40000000, -0x40000000)


class Touched(dict[int, int]):
    """Stands for the marks of that buffer: bytes written by where they start."""

    def __len__(self) -> int:
        return 2 * MIDDLE

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place.start, place.stop)

    def __bool__(self) -> bool:
        return True


@dataclass
class Program:
    """Writes a random program: loads, arithmetic, comparisons and stores on few registers, some under guards."""

    choice: random.Random
    lines: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    predicates: list[str] = field(default_factory=list)
    checked: list[tuple[str, str, str]] = field(default_factory=list)
    labels: int = 0
    depth: int = 0
    fresh: int = 20

    def target(self, pool: list[str], prefix: str, guard: str) -> str:
        """A new register, or one that is set again. One that a guard may leave as it is is set before."""
        if pool and self.choice.random() < 0.25:
            return self.choice.choice(pool)
        self.fresh += 1
        pool.append(f"{prefix}{self.fresh}")
        if guard:
            first = {"%r": "mov.u32 {}, 7;", "%rd": "mov.u64 {}, 7;", "%p": "setp.eq.s32 {}, 0, 1;"}[prefix]
            self.emit(first.format(pool[-1]))
        return pool[-1]

    def number(self) -> str:
        return self.choice.choice(self.numbers[-4:] if self.choice.random() < 0.8 else self.numbers)

    def operand(self) -> str:
        return self.number() if self.choice.random() < 0.2 else str(self.choice.choice(CORNERS))

    def guard(self) -> str:
        if self.predicates and self.choice.random() < 0.12:
            return self.choice.choice(("@", "@!")) + self.choice.choice(self.predicates) + " "
        return ""

    def emit(self, text: str) -> None:
        self.lines.append(text)

    def load(self) -> None:
        guard = self.guard()
        target = self.target(self.numbers, "%r", guard)
        self.emit(f"{guard}ld.global.u32 {target}, [%rd4+{128 * self.choice.randrange(4)}];")

    def compute(self) -> None:
        source, other, kind = self.number(), self.operand(), self.choice.choice(("s32", "u32"))
        text = self.choice.choice(
            (
                f"add.s32 {{}}, {source}, {other};",
                f"add.s32 {{}}, {source}, {self.choice.choice(CORNERS)};",
                f"sub.s32 {{}}, {source}, {other};",
                f"sub.s32 {{}}, {other}, {source};",
                f"mov.u32 {{}}, {source};",
                f"min.{kind} {{}}, {source}, {other};",
                f"max.{kind} {{}}, {source}, {other};",
                f"and.b32 {{}}, {source}, {other};",
                f"or.b32 {{}}, {source}, {other};",
                f"shl.b32 {{}}, {source}, 2;",
                f"shr.{kind} {{}}, {source}, 2;",
                f"mul.lo.s32 {{}}, {source}, 3;",
            )
        )
        if self.predicates and self.choice.random() < 0.25:
            text = f"selp.b32 {{}}, {source}, {other}, {self.choice.choice(self.predicates)};"
        guard = self.guard()
        target = self.target(self.numbers, "%r", guard)
        self.emit(guard + text.format(target))

    def extend(self) -> None:
        source = self.number()
        text = self.choice.choice((f"cvt.s64.s32 {{}}, {source};", f"cvt.u64.u32 {{}}, {source};"))
        if self.wide and self.choice.random() < 0.4:
            text = f"add.s64 {{}}, {self.choice.choice(self.wide)}, {self.choice.choice(CORNERS)};"
        guard = self.guard()
        target = self.target(self.wide, "%rd", guard)
        self.emit(guard + text.format(target))

    def compare(self) -> None:
        pool, bits = (self.wide, 64) if self.wide and self.choice.random() < 0.3 else (self.numbers, 32)
        source, other = self.choice.choice(pool[-3:]), str(self.choice.choice(CORNERS))
        if self.choice.random() < 0.2:
            source, other = other, source
        sign = self.choice.choice("su")
        comparison = self.choice.choice(("lt", "le", "gt", "ge", "eq", "ne"))
        if self.choice.random() < 0.6:  # the check of a range
            comparison, sign = self.choice.choice(("lt", "le", "ge", "gt")), "u"
            source, other = self.choice.choice(pool[-3:]), str(self.choice.choice((2, 9, 10, 31)))
        guard, third = self.guard(), ""
        if self.predicates and self.choice.random() < 0.3:
            comparison += self.choice.choice((".and", ".or", ".xor"))
            third = f", {self.choice.choice(self.predicates)}"
        target = self.target(self.predicates, "%p", guard)
        if bits == 32 and source in pool:
            self.checked.append((target, source, "@" if comparison[0] == "l" else "@!"))
        self.emit(f"{guard}setp.{comparison}.{sign}{bits} {target}, {source}, {other}{third};")

    def join(self) -> None:
        first, second = (self.choice.choice(self.predicates[-3:]) for _ in range(2))
        operation = self.choice.choice(
            (f"and.pred {{}}, {first}, {second};", f"or.pred {{}}, {first}, {second};")
        )
        if self.choice.random() < 0.3:
            operation = f"not.pred {{}}, {first};"
        guard = self.guard()
        target = self.target(self.predicates, "%p", guard)
        self.emit(guard + operation.format(target))

    def store(self) -> None:
        guard = ""
        if self.predicates and self.choice.random() < 0.6:
            guard = self.choice.choice(("@", "@", "@!")) + self.choice.choice(self.predicates[-3:]) + " "
        if self.wide and self.choice.random() < 0.3:
            self.emit(f"add.s64 %rd6, %rd2, {self.choice.choice(self.wide)};")
            self.emit(f"{guard}st.global.u8 [%rd6], %r1;")
            return
        place = f"%rd{900 + len(self.lines)}"
        kind, number = self.choice.choice("su"), self.number()
        if self.checked and self.choice.random() < 0.7:
            predicate, number, guard = self.choice.choice(self.checked[-2:])
            guard = f"{guard}{predicate} " if self.choice.random() < 0.8 else ""
        self.emit(f"mul.wide.{kind}32 {place}, {number}, 4; add.s64 {place}0, %rd2, {place};")
        for _ in range(self.choice.randrange(3)):
            self.statement(self.depth)
        self.emit(f"{guard}st.global.u32 [{place}0], %r1;")

    def branch(self, depth: int) -> None:
        self.labels += 1
        label, predicate = f"$B{self.labels}", self.choice.choice(self.predicates[-3:])
        if self.choice.random() < 0.3:  # a loop of a few rounds
            count = f"%r{800 + self.labels}"
            self.emit(f"ld.global.u32 {count}, [%rd4]; and.b32 {count}, {count}, 3; {label}:")
            self.block(depth + 1)
            done = f"%p{800 + self.labels}"
            self.emit(f"add.s32 {count}, {count}, -1; setp.gt.s32 {done}, {count}, 0; @{done} bra {label};")
            return
        self.emit(f"{self.choice.choice(('@', '@!'))}{predicate} bra {label};")
        self.block(depth + 1)
        if self.choice.random() < 0.4:
            self.emit(f"bra.uni {label}x; {label}:")
            self.block(depth + 1)
            label += "x"
        self.emit(f"{label}:")

    def statement(self, depth: int) -> None:
        kinds = [self.load, self.compute, self.compute, self.compare, self.compare, self.extend]
        if self.predicates:
            kinds += [self.join]
        if depth < 3:
            kinds += [self.store, self.store]
        if self.predicates and depth < 2 and self.choice.random() < 0.3:
            self.branch(depth)
            return
        self.depth = depth + 1
        self.choice.choice(kinds)()

    def block(self, depth: int) -> None:
        """Statements; what they alone have set is not read after them."""
        pools = (self.numbers, self.wide, self.predicates, self.checked)
        before = [len(pool) for pool in pools]
        for _ in range(self.choice.randint(2, 7)):
            self.statement(depth)
        self.store()
        for pool, length in zip(pools, before, strict=True):
            if depth:
                del pool[length:]


def programs(seed: int, count: int) -> Iterator[str]:
    for index in range(count):
        program = Program(random.Random(f"{seed} {index}"))
        program.load()
        program.compare()
        program.block(0)
        program.block(0)
        program.emit("ret;")
        # one store that is not claimed would hide behind another one that may go anywhere
        stores = [at for at, line in enumerate(program.lines) if "st.global" in line]
        kept = program.choice.choice(stores)
        yield " ".join(line for at, line in enumerate(program.lines) if at == kept or at not in stores)


def escaped(body: str, seed: int) -> tuple[dict[int, int], LaunchAnalysis]:
    """Writes of a launch on random indices that the analysis does not claim, and the analysis."""
    text = ".reg .b32 %r<900>; .reg .b64 %rd<9999>; .reg .pred %p<900>;"
    parsed = kernel(text + body)
    launch = launch_of(parsed, "k", (1, 1, 1), (16, 1, 1), (Pointer(0), Pointer(1, MIDDLE), N))
    choice = random.Random(seed)
    data = [
        choice.choice(CORNERS) if choice.random() < 0.6 else choice.randrange(-20, 40) for _ in range(128)
    ]
    touched: Any = Touched()
    marks = {0: np.zeros(512, dtype=np.bool_), 1: touched}
    seen = Observation(marks, marks)
    observe(parsed, launch, {0: struct.pack("<128i", *data), 1: b""}, seen)
    found = analyse_launch(parsed, launch, {0: 512, 1: 2 * MIDDLE})
    spans = [
        span
        for access in only(found, 1, "write")
        for box in access.boxes or (Box(0, (), 2 * MIDDLE),)
        for span in box.intervals()
    ]
    missed = {
        start: end
        for start, end in touched.items()
        if not any(low <= start and end <= high for low, high in spans)
    }
    return missed, found


def check_programs(seed: int, count: int) -> int:
    """Analyse and run ``count`` programs; for how many of them the claim is a small range."""
    narrow = 0
    for index, body in enumerate(programs(seed, count)):
        missed, found = escaped(body, index)
        assert not missed, (index, missed, body)
        boxes = [box for access in only(found, 1, "write") for box in access.boxes or ()]
        narrow += bool(boxes) and max(box.high for box in boxes) - min(box.low for box in boxes) < 1 << 20
    return narrow


def test_random_programs_touch_nothing_that_is_not_claimed() -> None:
    assert check_programs(1, 200) > 4


@pytest.mark.slow
def test_many_random_programs_touch_nothing_that_is_not_claimed() -> None:
    assert check_programs(2, 5_000) > 150
