"""Shares as users write them, and what they come to in whole units."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.trace.parallel.plan import matches
from tessera_core.trace.parallel.shares import Dimension, apportion, parse_shard
from tessera_formats.errors import InputError

HEADS = Dimension(name="key-value heads", extent=8, exact=True)


def counts(dimension: Dimension, *shares: int) -> list[int]:
    return [last - first for first, last in apportion(dimension, shares)]


@pytest.mark.parametrize(
    ("text", "shares"), [("2", (1, 1)), ("2,1", (2, 1)), (" 5 , 3 ", (5, 3)), ("3", (1, 1, 1))]
)
def test_shares_are_a_number_of_ranks_or_one_number_each(text: str, shares: tuple[int, ...]) -> None:
    shard = parse_shard(text, 1)
    assert (shard.shares, shard.rank, shard.ranks) == (shares, 1, len(shares))


@pytest.mark.parametrize("text", ["", "x", "0", "1", "-2", "2,0", "2,", "1.5", "99999", "2;1", "٣", "9" * 40])
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_shard(text, 0)
    assert "\n" not in str(caught.value)


def test_a_rank_beyond_the_shares_is_refused() -> None:
    with pytest.raises(InputError, match="there are 2 ranks, from 0 to 1"):
        parse_shard("2", 2)


@pytest.mark.parametrize(
    ("shares", "found"),
    [((1, 1), [4, 4]), ((2, 1), [5, 3]), ((3, 2), [5, 3]), ((5, 3), [5, 3]), ((1, 7), [1, 7])],
)
def test_uneven_shares_come_out_in_the_nearest_whole_units(shares: tuple[int, ...], found: list[int]) -> None:
    assert counts(HEADS, *shares) == found


@pytest.mark.parametrize(
    ("shares", "advice"),
    [((1,) * 3, "3,3,2"), ((1,) * 16, "at most 8"), ((30, 1), "7,1"), ((1, 1, 90), "1,1,6")],
)
def test_what_does_not_divide_is_named_with_what_does(shares: tuple[int, ...], advice: str) -> None:
    with pytest.raises(InputError, match=f"8 key-value heads can't be shared.*{advice}"):
        apportion(HEADS, shares)


def test_columns_stay_in_their_blocks() -> None:
    columns = Dimension(name="columns", extent=2880, unit=32)
    assert counts(columns, 2, 1) == [60, 30]
    with pytest.raises(InputError, match="64 columns in blocks of 32 can't be shared by 3 ranks"):
        apportion(Dimension(name="columns", extent=64, unit=32), (1, 1, 1))


@given(
    extent=st.integers(1, 400),
    unit=st.integers(1, 64),
    shares=st.lists(st.integers(1, 50), min_size=2, max_size=9),
    exact=st.booleans(),
)
def test_ranges_cover_everything_once_and_advice_works(
    extent: int, unit: int, shares: list[int], exact: bool
) -> None:
    dimension = Dimension(name="things", extent=extent, unit=unit, exact=exact)
    assert extent % dimension.units == 0
    try:
        ranges = apportion(dimension, shares)
    except InputError as problem:
        advised = re.search(r"--tensor-parallel ([0-9,]+)$", str(problem))
        if advised is None:
            assert dimension.units < len(shares)
            return
        apportion(dimension, [int(part) for part in advised[1].split(",")])
        return
    assert ranges[0][0] == 0
    assert ranges[-1][1] == dimension.units
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    for (first, last), share in zip(ranges, shares, strict=True):
        assert last > first
        assert abs((last - first) - dimension.units * share / sum(shares)) < 1


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.*.mlp.up_proj", "model.layers.12.mlp.up_proj", True),
        ("model.layers.*.up_proj", "model.layers.12.mlp.up_proj", False),
        ("lm_head", "lm_heads", False),
        ("a.b", "aXb", False),
    ],
)
def test_a_star_is_one_part_of_a_name(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected
