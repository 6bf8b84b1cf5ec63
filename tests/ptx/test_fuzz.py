"""Damaged modules: whatever the damage, a module parses or is refused with its place, and what parses can be
analysed; neither crashes, hangs or eats memory."""

from __future__ import annotations

import random
import re
import resource
import time
from collections.abc import Iterator
from functools import lru_cache

import pytest

from tessera_core.ptx import analysis
from tessera_core.ptx.analysis import LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Function, Module
from tessera_formats.errors import PtxSyntaxError
from tests.ptx.effect_cases import EXAMPLES, module_text
from tests.ptx.launches import FIXTURES

SECONDS_LIMIT = 2.0
GROWTH_LIMIT_BYTES = 1 << 30
_TOKEN = re.compile(r"\s+|[%$\w.:]+|.", re.DOTALL)
_BYTES = '\0\t\n "#%()*,./0:;<@[]_`{|}~\x7fé'


@lru_cache
def bases() -> tuple[tuple[str, ...], ...]:
    """Tokens of the modules to damage: the stored ones, and one per example of the effects table."""
    stored = [path.read_text() for path in sorted(FIXTURES.glob("*.ptx"))]
    stored.sort(key=len)
    examples = [module_text((example,), "sm_100a") for example in EXAMPLES]
    return tuple(tuple(_TOKEN.findall(text)) for text in (*stored[: len(stored) // 2], *examples))


def damaged(choice: random.Random) -> str:
    """A module with up to four tokens deleted, doubled, swapped or replaced, or characters overwritten."""
    tokens = list(choice.choice(bases()))
    for _ in range(choice.randint(1, 4)):
        i, j = choice.randrange(len(tokens)), choice.randrange(len(tokens))
        kind = choice.randrange(5)
        if kind == 0:
            tokens[i] = ""
        elif kind == 1:
            tokens[i] *= choice.randint(2, 3)
        elif kind == 2:
            tokens[i], tokens[j] = tokens[j], tokens[i]
        elif kind == 3:
            tokens[i] = tokens[j]
        elif tokens[i]:
            at = choice.randrange(len(tokens[i]))
            tokens[i] = tokens[i][:at] + choice.choice(_BYTES) + tokens[i][at + 1 :]
    return "".join(tokens)


def modules(seed: int, count: int) -> Iterator[Module | None]:
    """Damaged modules, None for those that are refused."""
    choice = random.Random(seed)
    for _ in range(count):
        text = damaged(choice)
        start = time.process_time()
        try:
            parsed = parse_module(text, "damaged.ptx")
        except PtxSyntaxError as refused:
            assert re.match(r"damaged\.ptx:\d+:\d+: expected .+, found ", str(refused))
            parsed = None
        assert time.process_time() - start < SECONDS_LIMIT, text
        yield parsed


def launch_of_any(entry: Function, choice: random.Random) -> LaunchShape:
    """A launch with a pointer for every 64-bit parameter and small numbers for the others."""
    content = bytearray(min(entry.parameter_bytes(), 4096))
    relocations = []
    for parameter, offset in entry.parameter_offsets().items():
        size = next(p.bytes for p in entry.parameters if p.name == parameter)
        if offset + size > len(content):
            break
        if size in (8, 128):
            relocations.append(Relocation(offset, len(relocations) % 3, 0))
        elif 0 < size <= 4:
            content[offset] = choice.choice((0, 1, 7, 64))
    return LaunchShape(
        entry=entry.name,
        grid=(3, 2, 1),
        block=(32, 1, 1),
        shared_bytes=0,
        parameters=bytes(content),
        relocations=tuple(relocations),
    )


def analyse_damaged(seed: int, count: int) -> int:
    """Analyse ``count`` damaged modules that parse; the number of launches analysed."""
    choice = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    done = launches = 0
    for parsed in modules(seed + 1, 20 * count):
        if parsed is None:
            continue
        for entry in parsed.entries()[:1]:
            start = time.process_time()
            found = analyse_launch(parsed, launch_of_any(entry, choice), {0: 65536, 1: 65536, 2: 65536})
            assert time.process_time() - start < SECONDS_LIMIT, parsed.text
            assert all(box.low >= 0 for access in found.accesses for box in access.boxes or ()), parsed.text
            launches += 1
        done += 1
        if done % 64 == 0:
            analysis._remembered.cache_clear()
        if done == count:
            break
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert done == count and after - before < GROWTH_LIMIT_BYTES
    return launches


def test_damaged_modules_parse_or_are_refused() -> None:
    refused = sum(parsed is None for parsed in modules(1, 2_000))
    assert 200 < refused < 1_900  # the damage is neither harmless nor fatal


def test_damaged_modules_are_analysed() -> None:
    assert analyse_damaged(2, 150) > 100


@pytest.mark.slow
def test_many_damaged_modules_parse_or_are_refused() -> None:
    assert sum(parsed is None for parsed in modules(3, 100_000)) > 10_000


@pytest.mark.slow
def test_many_damaged_modules_are_analysed() -> None:
    assert analyse_damaged(4, 5_000) > 4_000
