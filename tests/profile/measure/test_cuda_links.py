import pytest

from tessera_core.profile.measure.cuda_links import copy_row, measure_copies, transport_of
from tessera_core.profile.measure.links import Line, SizeFit


@pytest.mark.parametrize(
    ("source", "destination", "peer", "transport"),
    [
        ("cuda:0", "cuda:0", False, "device-memory"),
        ("cuda:0", "cpu", False, "pinned-host"),
        ("cpu", "cuda:1", False, "pinned-host"),
        ("cuda:0", "cuda:1", True, "peer-copy"),
        ("cuda:0", "cuda:1", False, "pinned-host"),  # staged through the host
    ],
)
def test_how_bytes_go(source: str, destination: str, peer: bool, transport: str) -> None:
    assert transport_of(source, destination, peer) == transport


def test_a_copy_engine_leaves_the_sender_free() -> None:
    fit = SizeFit(line=Line(2.0, 5000.0), sizes_bytes=(4096,), times_us=(2.8192,), samples=9)
    row = copy_row(fit, ("a", "b"), "peer-copy")
    assert not row.occupies_sender and row.send_us == row.receive_us == 0
    assert row.transfer_us(4096) == pytest.approx(2.8192)
    assert (row.gbit_per_s, row.samples) == (40.0, 9)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source", "destination", "least_gbit_per_s"),
    [("cuda:0", "cuda:0", 500), ("cuda:0", "cpu", 20), ("cpu", "cuda:0", 20)],
)
def test_copies_are_measured(source: str, destination: str, least_gbit_per_s: float) -> None:
    row = measure_copies(source, destination, ("a", "b"), 0.5)
    assert 0 < row.latency_us < 100
    assert row.gbit_per_s > least_gbit_per_s
    assert row.residual < 0.5
