"""CUDA devices: ``cuda:N`` is a whole GPU, ``cuda:0/sm=96+36#1`` the second of two slices that share one.

A slice is a green context: a share of the multiprocessors. All slices of a GPU are cut from one resource, so that
they are disjoint; streams made in one, and graphs captured on these, keep the share. Memory bandwidth, the L2 cache
and power stay shared. PyTorch and cuda-bindings (extra ``cuda``) are imported when first used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tessera_core.profile.catalogue import Catalogue
from tessera_formats.errors import InputError

_COUNT = r"[1-9][0-9]*"
_NAME = re.compile(rf"cuda:(0|{_COUNT})(?:/sm=({_COUNT}(?:\+{_COUNT})*)(?:#(0|{_COUNT}))?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A GPU by PyTorch's number, or slice ``part`` of it.

    ``shares``: multiprocessors of every slice that the GPU is cut into, in order; empty: it is whole.
    """

    index: int
    shares: tuple[int, ...] = ()
    part: int = 0

    @property
    def name(self) -> str:
        """How bindings call it."""
        whole = f"cuda:{self.index}"
        return f"{whole}/sm={'+'.join(map(str, self.shares))}#{self.part}" if self.shares else whole

    @property
    def torch_name(self) -> str:
        """How PyTorch calls the GPU that it is on."""
        return f"cuda:{self.index}"

    @property
    def multiprocessors(self) -> int | None:
        """Of a slice; None for a whole GPU."""
        return self.shares[self.part] if self.shares else None

    def is_beside(self, other: CudaDevice) -> bool:
        """Whether the two are different slices of one cut, and so disjoint."""
        return (
            self.index == other.index
            and bool(self.shares)
            and self.shares == other.shares
            and self.part != other.part
        )


@dataclass(frozen=True, slots=True)
class Lane:
    """A device that is open: its stream. ``context``: the green context of a slice, kept alive with the stream."""

    device: CudaDevice
    stream: Any
    context: Any = None


def parse_cuda(name: str) -> CudaDevice:
    """Read ``cuda:N``, ``cuda:N/sm=A+B#K`` or ``cuda:N/sm=A``, whether there is such a device here or not.

    Raises :class:`InputError` for another form, or for a slice that the cut does not have.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(
            f"hardware {name!r}: is no CUDA device; write cuda:0, or cuda:0/sm=96+36#1 for slice 1 of two"
        )
    index, cut, part = int(match[1]), match[2], match[3]
    shares = tuple(int(count) for count in cut.split("+")) if cut else ()
    if len(shares) > 1 and part is None:
        raise InputError(
            f"hardware {name}: names {len(shares)} slices; write which one, as {name}#0 or {name}#{len(shares) - 1}"
        )
    chosen = int(part or 0)
    if shares and chosen >= len(shares):
        raise InputError(
            f"hardware {name}: the cut has {len(shares)} slice{'s' if len(shares) > 1 else ''}, numbered from 0;"
            f" write #{len(shares) - 1} or lower"
        )
    return CudaDevice(index=index, shares=shares, part=chosen)


def cuda_device(name: str) -> CudaDevice:
    """The device ``name`` of this machine (forms: :func:`parse_cuda`).

    Raises :class:`InputError` where the form is another, the GPU is not here, or it has too few multiprocessors.
    """
    device = parse_cuda(name)
    count = _device_count()
    if not count:
        raise InputError(
            f"hardware {name}: this machine has no CUDA device that PyTorch can use;"
            " name the device type alone to look its times up or model them"
        )
    if device.index >= count:
        last = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0"
        raise InputError(f"hardware {name}: this machine has {count} CUDA device(s), so name {last}")
    total = multiprocessors_of(device.index)
    if sum(device.shares) > total:
        raise InputError(
            f"hardware {name}: asks for {sum(device.shares)} multiprocessors, {device.torch_name} has {total};"
            " name smaller slices"
        )
    return device


def check_bound(option: str, base: str, device: CudaDevice, catalogue: Catalogue) -> None:
    """Refuse a catalogued type bound to other hardware; ``option``: as the user wrote it, ``base``: the type's name.

    A type that the catalogue gives no reported name (a user's own) is taken at the user's word.
    """
    reported = reported_name(device.index)
    known = catalogue.types.get(base)
    if known is not None and known.kind != "gpu":
        raise InputError(
            f"--device {option}: {base} is a {known.kind.upper()}, {device.name} is a {reported}"
        )
    actual = catalogue.reported(reported)
    if actual is not None and actual.name != base and (known is None or known.reported):
        raise InputError(f"--device {option}: this is an {reported}; write {actual.name}={device.name}")
    if actual is None and known is not None and known.reported:
        raise InputError(
            f"--device {option}: this is an {reported}, which the catalogue lacks, and no {base};"
            " add a type of your own for it"
        )


def open_lanes(device: CudaDevice) -> tuple[Lane, ...]:
    """A lane for the whole GPU, or one for every slice of the cut that ``device`` is of, in the cut's order.

    Raises :class:`InputError` where the driver gives other slices than asked for, or has none.
    """
    import torch

    if not device.shares:
        return (Lane(device, torch.cuda.Stream(device.torch_name)),)
    torch.cuda.init()
    with torch.cuda.device(device.index):
        torch.zeros(1, device=device.torch_name)  # makes the primary context, which green contexts build on
        driver = _driver(device)
        pieces = split(driver, device)
        return tuple(
            _slice(driver, CudaDevice(index=device.index, shares=device.shares, part=part), piece)
            for part, piece in enumerate(pieces)
        )


def split(driver: Any, device: CudaDevice) -> list[Any]:
    """The driver's resources for the slices of a cut, disjoint because one split leaves what the next one splits.

    Raises :class:`InputError` where the driver rounds a count up, which it does to whole clusters.
    """
    handle = _answer(driver, device, driver.cuDeviceGet, device.index)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    rest = _answer(driver, device, driver.cuDeviceGetDevResource, handle, kind)
    pieces: list[Any] = []
    for share in device.shares:
        if len(pieces) == len(device.shares) - 1 and int(rest.sm.smCount) == share:
            pieces.append(rest)
            break
        groups, count, left = _answer(driver, device, driver.cuDevSmResourceSplitByCount, 1, rest, 0, share)
        given = int(groups[0].sm.smCount) if count else 0
        if given != share:
            raise InputError(
                f"hardware {device.name}: the driver makes a slice of {given} multiprocessors where {share} are"
                f" asked for, with {int(rest.sm.smCount)} left; name {given or 'smaller slices'}, or what the"
                " other slices leave"
            )
        pieces.append(groups[0])
        rest = left
    return pieces


def _slice(driver: Any, device: CudaDevice, piece: Any) -> Lane:
    import torch

    handle = _answer(driver, device, driver.cuDeviceGet, device.index)
    description = _answer(driver, device, driver.cuDevResourceGenerateDesc, [piece], 1)
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _answer(driver, device, driver.cuGreenCtxCreate, description, handle, int(flag))
    apart = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _answer(driver, device, driver.cuGreenCtxStreamCreate, context, int(apart), 0)
    return Lane(device, torch.cuda.ExternalStream(int(stream), device=device.torch_name), context)


def _driver(device: CudaDevice) -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as problem:
        raise InputError(
            f"hardware {device.name}: slices need cuda-bindings; run: pip install 'tessera-toolchain[cuda]'"
        ) from problem
    return driver


def _answer(driver: Any, device: CudaDevice, function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if int(status):
        raise InputError(
            f"hardware {device.name}: {function.__name__} answers {status.name};"
            " slices need a driver of CUDA 12.4 or later and a GPU that nobody else has cut"
        )
    return values[0] if len(values) == 1 else tuple(values)


def _device_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def multiprocessors_of(index: int) -> int:
    """Multiprocessors of the whole GPU."""
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def reported_name(index: int) -> str:
    """How CUDA calls the GPU."""
    import torch

    return torch.cuda.get_device_name(index)
