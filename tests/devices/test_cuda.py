"""CUDA devices by name: forms, error lines, types bound to other hardware, slices cut by a driver that rounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices import cuda
from tessera_core.devices.cuda import CudaDevice, check_bound, cuda_device, parse_cuda, split
from tessera_core.profile.catalogue import catalogue
from tessera_formats.errors import InputError

COUNTS = st.lists(st.integers(1, 200), min_size=1, max_size=5)


@given(index=st.integers(0, 30), shares=COUNTS, data=st.data())
def test_a_slice_is_read_back_from_its_name(index: int, shares: list[int], data: st.DataObject) -> None:
    part = data.draw(st.integers(0, len(shares) - 1))
    device = CudaDevice(index=index, shares=tuple(shares), part=part)
    assert parse_cuda(device.name) == device
    assert device.multiprocessors == shares[part]


def test_a_whole_gpu_has_a_short_name() -> None:
    device = parse_cuda("cuda:3")
    assert device == CudaDevice(index=3)
    assert device.name == device.torch_name == "cuda:3"
    assert device.multiprocessors is None


def test_one_slice_needs_no_number() -> None:
    assert parse_cuda("cuda:0/sm=96").name == "cuda:0/sm=96#0"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda", "write cuda:0"),
        ("cuda:01", "write cuda:0"),
        ("cuda:0/sm=", "write cuda:0"),
        ("cuda:0/sm=0+132#0", "write cuda:0"),
        ("gpu:0", "write cuda:0"),
        ("cuda:0/sm=96+36", "write which one, as cuda:0/sm=96+36#0 or cuda:0/sm=96+36#1"),
        ("cuda:0/sm=96+36#2", "write #1 or lower"),
    ],
)
def test_another_form_is_one_line(name: str, said: str) -> None:
    with pytest.raises(InputError, match="hardware") as problem:
        parse_cuda(name)
    assert said in str(problem.value)
    assert "\n" not in str(problem.value)


def test_slices_of_one_cut_are_beside_each_other() -> None:
    first, second = parse_cuda("cuda:0/sm=96+36#0"), parse_cuda("cuda:0/sm=96+36#1")
    assert first.is_beside(second)
    assert not first.is_beside(first)
    assert not first.is_beside(parse_cuda("cuda:1/sm=96+36#1"))
    assert not first.is_beside(parse_cuda("cuda:0/sm=36+96#1"))
    assert not parse_cuda("cuda:0").is_beside(parse_cuda("cuda:0"))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """One H200, as far as names and counts go."""
    monkeypatch.setattr(cuda, "_device_count", lambda: 1)
    monkeypatch.setattr(cuda, "multiprocessors_of", lambda index: 132)
    monkeypatch.setattr(cuda, "reported_name", lambda index: "NVIDIA H200")


def test_without_cuda_the_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_device_count", lambda: 0)
    with pytest.raises(InputError, match=r"no CUDA device.*name the device type alone"):
        cuda_device("cuda:0")


@pytest.mark.usefixtures("h200")
def test_devices_that_are_not_here_are_refused() -> None:
    assert cuda_device("cuda:0/sm=96+36#1").multiprocessors == 36
    with pytest.raises(InputError, match=r"has 1 CUDA device\(s\), so name cuda:0"):
        cuda_device("cuda:1")
    with pytest.raises(InputError, match="asks for 136 multiprocessors, cuda:0 has 132"):
        cuda_device("cuda:0/sm=96+40#1")


@pytest.mark.usefixtures("h200")
def test_a_type_is_bound_only_to_its_own_hardware() -> None:
    device = CudaDevice(index=0)
    check_bound("h200-sxm=cuda:0", "h200-sxm", device, catalogue())
    with pytest.raises(InputError, match="this is an NVIDIA H200; write h200-sxm=cuda:0"):
        check_bound("a100-80gb=cuda:0", "a100-80gb", device, catalogue())
    with pytest.raises(InputError, match="cpu-1thread is a CPU"):
        check_bound("cpu-1thread=cuda:0", "cpu-1thread", device, catalogue())


def test_hardware_that_the_catalogue_lacks_is_no_catalogued_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "reported_name", lambda index: "NVIDIA Unheard-of")
    check_bound("mine=cuda:0", "mine", CudaDevice(index=0), catalogue())
    with pytest.raises(InputError, match="which the catalogue lacks"):
        check_bound("l40s=cuda:0", "l40s", CudaDevice(index=0), catalogue())


class Status(IntEnum):
    SUCCESS = 0
    INVALID = 1


@dataclass
class Piece:
    """A resource of the pretended driver: its multiprocessors by number."""

    numbers: range

    @property
    def sm(self) -> SimpleNamespace:
        return SimpleNamespace(smCount=len(self.numbers))


class RoundingDriver:
    """Splits off groups rounded up to eight, as Hopper's does."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)

    def __init__(self, total: int = 132) -> None:
        self.total = total

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.SUCCESS, index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.SUCCESS, Piece(range(self.total))

    def cuDevSmResourceSplitByCount(  # noqa: N802
        self, groups: int, piece: Piece, flags: int, least: int
    ) -> tuple[Any, ...]:
        count = -(-least // 8) * 8
        if count > len(piece.numbers):
            return Status.INVALID, [], 0, piece
        return Status.SUCCESS, [Piece(piece.numbers[:count])], 1, Piece(piece.numbers[count:])


@given(sizes=st.lists(st.integers(1, 6).map(lambda n: n * 8), min_size=1, max_size=3), last=st.booleans())
def test_slices_are_disjoint_and_as_large_as_asked_for(sizes: list[int], last: bool) -> None:
    driver = RoundingDriver(200)
    shares = (*sizes, 200 - sum(sizes)) if last else tuple(sizes)
    pieces = split(driver, CudaDevice(index=0, shares=shares))
    assert [len(piece.numbers) for piece in pieces] == list(shares)
    taken = [number for piece in pieces for number in piece.numbers]
    assert len(set(taken)) == len(taken)


def test_a_count_that_the_driver_rounds_is_refused() -> None:
    with pytest.raises(InputError, match="makes a slice of 96 multiprocessors where 90 are asked for"):
        split(RoundingDriver(), CudaDevice(index=0, shares=(90, 42)))


def test_a_driver_that_cannot_split_is_one_line() -> None:
    with pytest.raises(InputError, match="cuDevSmResourceSplitByCount answers INVALID"):
        split(RoundingDriver(), CudaDevice(index=0, shares=(96, 64)))


@pytest.mark.gpu
def test_slices_of_a_gpu_are_disjoint() -> None:
    from tessera_core.profile.measure.cuda import open_labs
    from tessera_core.profile.measure.cuda_slices import check_disjoint

    total = cuda.multiprocessors_of(0)
    first = total * 3 // 4 // 8 * 8
    labs = open_labs(cuda_device(f"cuda:0/sm={first}+{total - first}#0"))
    slowest = max(check_disjoint(labs, "cuda:0"))
    assert 0.8 < slowest < 1.6


@pytest.mark.gpu
def test_a_gpu_is_not_another_type() -> None:
    other = "l4" if "L4" not in cuda.reported_name(0) else "h200-sxm"
    with pytest.raises(InputError, match="this is an"):
        check_bound(f"{other}=cuda:0", other, CudaDevice(index=0), catalogue())
