"""Mutants of the effects table: each must be noticed by the examples of the row that it changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tessera_core.ptx import effects
from tessera_core.ptx.effects import TABLE, Effects, Place, Row, effects_of
from tests.ptx.effect_cases import EXAMPLES, claims_of
from tests.ptx.test_effects import key

OTHER_MODES = {"r": ("w", "rw"), "w": ("r", "rw"), "rw": ("r", "w")}


@pytest.fixture(autouse=True)
def fresh_effects() -> Iterator[None]:
    effects_of.cache_clear()
    yield
    effects_of.cache_clear()


def noticed(monkeypatch: pytest.MonkeyPatch, row: Row, mutant: Row | None) -> bool:
    """Whether an example of ``row`` is claimed differently where ``mutant`` (None: nothing) stands in its place."""
    table = tuple(mutant if other is row else other for other in TABLE)
    monkeypatch.setattr(effects, "TABLE", tuple(other for other in table if other is not None))
    effects_of.cache_clear()
    examples = [example for example in EXAMPLES if example.row == key(row)]
    if not (row.places or row.reaches_all or row.cancels_blocks):
        return any(effects_of(example.text.rstrip(";").split()[0]) != Effects() for example in examples)
    return any(claims_of(example.text) != example.claims for example in examples)


@pytest.mark.parametrize("row", TABLE, ids=key)
def test_a_row_removed_is_noticed(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    assert not noticed(monkeypatch, row, row)
    assert noticed(monkeypatch, row, None)


def mutants(row: Row) -> Iterator[tuple[str, Row]]:
    """The row with one thing wrong. What happens in shared memory alone is not visible, and left out."""
    for index, place in enumerate(row.places):
        if place.space == "shared" or (place.named == 1 and key(row) != "cp.async.bulk"):
            continue
        changed: list[Place] = [replace(place, mode=mode) for mode in OTHER_MODES[place.mode]]  # type: ignore[arg-type]
        changed.append(replace(place, space="shared"))
        changed.append(replace(place, operand=1 - place.operand))
        if place.extent != "tensor":
            changed.append(replace(place, sure=not place.sure))
        changed += [
            replace(place, **{name: None}) for name in ("count", "size", "stride") if getattr(place, name)
        ]
        for mutant in changed:
            yield str(mutant), replace(row, places=(*row.places[:index], mutant, *row.places[index + 1 :]))
    if row.describes is not None:
        yield "describes nothing", replace(row, describes=None)
    if row.copies_map:
        yield "copies no map", replace(row, copies_map=False)
    if row.cancels_blocks:
        yield "cancels nothing", replace(row, cancels_blocks=False)
    if row.reaches_all:
        yield "reaches nothing", replace(row, reaches_all="")


@pytest.mark.parametrize("row", TABLE, ids=key)
def test_a_row_with_one_thing_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    missed = [what for what, mutant in mutants(row) if not noticed(monkeypatch, row, mutant)]
    assert not missed
