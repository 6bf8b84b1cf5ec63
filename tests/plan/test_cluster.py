"""Cluster files made concrete: counts, memory, links by name, group or type, and one-line refusals."""

from typing import Any

import pytest

from tessera_core.plan.cluster import Cluster, Link, resolve_cluster
from tessera_formats.errors import InputError

MEMORY = {"a100-80gb": 80 * 10**9, "l40s": 48 * 10**9}
BETWEEN_CPUS = Link(latency_us=9.0, gbit_per_s=100.0, send_us=1.0, receive_us=2.0, occupies_sender=True)


def resolve(devices: list[dict[str, Any]], links: list[dict[str, Any]] | None = None) -> Cluster:
    profile = {("cpu-1thread", "cpu-1thread"): BETWEEN_CPUS}
    content: dict[str, Any] = {"device": devices, "link": links or []}
    return resolve_cluster(content, "c.toml", lambda a, b: profile.get((a, b)), MEMORY.get)


def link(rate: float, **ends: Any) -> dict[str, Any]:
    return {"gbit_per_s": rate, "latency_us": 5.0, **ends}


def test_counts_give_numbered_devices_with_the_types_memory() -> None:
    cluster = resolve(
        [{"name": "a", "type": "a100-80gb", "count": 2}, {"name": "l", "type": "l40s", "memory_gb": 40.5}],
        [link(200, between=["a", "l"]), link(400, between=["a", "a"])],
    )
    assert [(d.name, d.capacity_bytes) for d in cluster.devices] == [
        ("a.0", 80 * 10**9),
        ("a.1", 80 * 10**9),
        ("l", 40_500_000_000),
    ]
    assert cluster.links["a.0", "a.1"].gbit_per_s == 400
    assert cluster.links["l", "a.1"].gbit_per_s == 200


def test_names_win_over_types_and_the_file_over_the_profile() -> None:
    cpus = [{"name": n, "type": "cpu-1thread", "memory_gb": 4} for n in ("p", "q", "r")]
    cluster = resolve(
        cpus, [link(1, **{"from": "p", "to": "q"}), link(2, **{"from": "p", "to": "cpu-1thread"})]
    )
    assert cluster.links["p", "q"].gbit_per_s == 1
    assert cluster.links["p", "r"].gbit_per_s == 2
    assert cluster.links["q", "p"] == BETWEEN_CPUS


def test_a_domain_holds_what_its_largest_member_states() -> None:
    cpus = [
        {"name": n, "type": "cpu-1thread", "memory_gb": g, "memory_domain": "host"}
        for n, g in (("p", 4), ("q", 6))
    ]
    assert resolve(cpus).domains == {"host": 6 * 10**9}


def test_wire_time_is_bytes_over_rate() -> None:
    assert BETWEEN_CPUS.wire_us(1_000_000) == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("devices", "links", "words"),
    [
        ([], [], ("lists no device",)),
        ([{"name": "a", "type": "nonsense"}], [], ("device a", "'nonsense'", "memory_gb")),
        ([{"name": "a", "type": "l40s"}] * 2, [], ("two devices are called a",)),
        (
            [{"name": "a", "type": "l40s"}, {"name": "b", "type": "a100-80gb"}],
            [],
            ("no link from a (l40s) to b (a100-80gb)", "[[link]]"),
        ),
        (
            [{"name": "a", "type": "l40s"}, {"name": "b", "type": "l40s"}],
            [link(1, between=["a", "c"])],
            ("link[0] names 'c'", "no device or type"),
        ),
        ([{"name": "a", "type": "l40s"}], [link(1, between=["a"])], ("link[0] needs either between",)),
        ([{"name": "a", "type": "l40s"}], [link(1, to="a")], ("link[0] needs either between",)),
    ],
)
def test_refusals_name_the_place_on_one_line(
    devices: list[dict[str, Any]], links: list[dict[str, Any]], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as refusal:
        resolve(devices, links)
    assert "\n" not in str(refusal.value)
    for word in ("c.toml", *words):
        assert word in str(refusal.value)


def test_a_link_of_the_file_may_say_what_either_end_pays() -> None:
    cpus = [{"name": n, "type": "cpu-1thread", "memory_gb": 4} for n in ("p", "q")]
    ends = {"send_us": 3.0, "receive_us": 1.5, "occupies_sender": True, "transport": "shared-memory"}
    cluster = resolve(cpus, [link(8, **{"from": "p", "to": "q"}, **ends)])
    assert cluster.links["p", "q"] == Link(
        latency_us=5.0, gbit_per_s=8.0, send_us=3.0, receive_us=1.5, occupies_sender=True
    )


def test_a_profiles_link_holds_within_one_host_only() -> None:
    cpus = [{"name": n, "type": "cpu-1thread", "memory_gb": 4} for n in ("p", "q", "r")]
    for row, host in zip(cpus, ("left", "left", "right"), strict=True):
        row["host"] = host
    with pytest.raises(InputError, match=r"no link from p .* to r .*; they are on left and right, so add"):
        resolve(cpus)
    between = [link(10, between=[a, "r"]) for a in ("p", "q")]
    assert resolve(cpus, between).links["p", "q"] == BETWEEN_CPUS
    assert resolve(cpus, between).links["r", "p"].gbit_per_s == 10
