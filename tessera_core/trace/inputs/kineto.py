"""A profile that PyTorch's profiler exported (``export_chrome_trace``, written by Kineto), as plain values.

Kept are launches on the GPU, the calls that made them, and the operators and annotations around those calls. Times
are in microseconds on the profiler's clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera_core.trace.inputs.json_stream import entries
from tessera_formats.errors import InputError

LaunchKind = Literal["kernel", "memcpy", "memset"]
_LAUNCHES: Mapping[str, LaunchKind] = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_MOST = (1 << 31) - 1
"""Largest number of blocks, threads, extents or bytes of one block that is believed."""
_LATEST_US = 1e17
"""Latest moment that is believed: clocks count from the start of the machine or from 1970, about 2e15 by now."""
_LONGEST_US = 3.6e9
"""Longest launch that is believed: an hour."""
_STEP = re.compile(r"ProfilerStep#(\d+)")

DTYPES: Mapping[str, str] = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
    "short": "int16",
    "short int": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
}
"""PyTorch's names of the C++ types that profiles speak of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An argument as the profile shows it: a tensor's dtype and shape, or the text of anything else."""

    dtype: str | None
    shape: tuple[int, ...]
    text: str

    def described(self) -> Any:
        """JSON for the trace."""
        return self.text if self.dtype is None else {"dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOp:
    """An operator call. ``record``: its number in the ExecutionTrace; ``external``: in launches."""

    name: str
    thread: tuple[str, str]
    start_us: float
    end_us: float
    external: int | None
    record: int | None
    arguments: tuple[Shown, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLaunch:
    """A kernel, copy or fill as the GPU ran it. ``correlation`` names the call that made it."""

    kind: LaunchKind
    name: str
    device: int
    stream: int
    start_us: float
    duration_us: float
    correlation: int
    external: int | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA runtime or driver."""

    name: str
    thread: tuple[str, str]
    start_us: float


@dataclass(frozen=True, slots=True)
class Step:
    """An iteration, as the profiler's schedule marks it."""

    number: int
    thread: tuple[str, str]
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a file holds. ``gpus``: reported name by device number. ``facts``: versions that it states."""

    path: Path
    gpus: Mapping[int, str]
    facts: Mapping[str, str]
    ops: tuple[CpuOp, ...]
    launches: tuple[GpuLaunch, ...]
    calls: Mapping[int, Call]
    steps: tuple[Step, ...]


def read_profile(path: Path) -> Profile:
    """Read a Kineto file, compressed or not.

    Raises :class:`InputError` for a file that is damaged or no profile, and for one without GPU launches.
    """
    reader = _Reader(path)
    for key, value in entries(path, ("traceEvents",)):
        if key == "traceEvents":
            reader.event(value)
        elif key == "deviceProperties":
            reader.devices(value)
        elif key in ("cuda_runtime_version", "cuda_driver_version", "cupti_version"):
            reader.facts[key] = str(value)
    return reader.profile()


class _Reader:
    """Collects events; equal descriptions of arguments are kept once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gpus: dict[int, str] = {}
        self.facts: dict[str, str] = {}
        self.ops: list[CpuOp] = []
        self.launches: list[GpuLaunch] = []
        self.calls: dict[int, Call] = {}
        self.steps: list[Step] = []
        self.shown: dict[str, tuple[Shown, ...]] = {}
        self.count = 0

    def devices(self, value: Any) -> None:
        for device in value if isinstance(value, list) else ():
            if isinstance(device, dict) and isinstance(device.get("name"), str):
                number = device.get("id", len(self.gpus))
                if not isinstance(number, int) or isinstance(number, bool):
                    raise InputError(
                        f"{self.path}: a GPU of its deviceProperties has the id {number!r}, which is no number; pass"
                        " the file as export_chrome_trace wrote it"
                    )
                name = text_of(device["name"])
                if self.gpus.setdefault(number, name) != name:
                    raise InputError(
                        f"{self.path}: GPU {number} is both {self.gpus[number]!r} and {name!r}: recordings of several"
                        " machines in one file; pass each by itself"
                    )

    def event(self, event: Any) -> None:
        self.count += 1
        try:
            if event.get("ph") == "X":
                self._complete(event, event.get("cat"), event.get("args") or {})
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as problem:
            raise InputError(
                f"{self.path}: event {self.count} is not as torch.profiler writes it ({type(problem).__name__}:"
                f" {problem}); pass the file as export_chrome_trace wrote it"
            ) from problem

    def _complete(self, event: dict[str, Any], category: Any, args: dict[str, Any]) -> None:
        if category in _LAUNCHES:
            self.launches.append(_launch(event, _LAUNCHES[category], args))
        elif category in _CALLS:
            if args.get("correlation"):
                call = Call(text_of(event["name"]), _thread(event), _time(event["ts"]))
                self.calls[_whole(args["correlation"])] = call
        elif category == "cpu_op":
            start = _time(event["ts"])
            self.ops.append(
                CpuOp(
                    name=text_of(event["name"]),
                    thread=_thread(event),
                    start_us=start,
                    end_us=start
                    + max(0.0, _time(event.get("dur", 0.0))),  # a call that never ended may lack one
                    external=_integer(args.get("External id")),
                    record=_integer(args.get("Record function id")),
                    arguments=self._arguments(args),
                )
            )
        elif category == "user_annotation":
            match = _STEP.fullmatch(str(event["name"]))
            if match:
                start = _time(event["ts"])
                end = start + _time(event.get("dur", 0.0))
                self.steps.append(Step(int(match[1]), _thread(event), start, end))

    def _arguments(self, args: dict[str, Any]) -> tuple[Shown, ...]:
        dims, types = args.get("Input Dims", ()), args.get("Input type", ())
        texts = args.get("Concrete Inputs", ())
        key = repr((dims, types, texts))
        found = self.shown.get(key)
        if found is None:
            found = self.shown[key] = tuple(
                shown
                for index, (shape, kind) in enumerate(zip(dims, types))
                for shown in _shown(shape, str(kind), str(texts[index]) if index < len(texts) else "")
            )
        return found

    def profile(self) -> Profile:
        if not self.launches:
            what = "is no trace of torch.profiler: it has no traceEvents"
            if self.count:
                what = "holds no GPU kernels: a profile of CPU activity alone says nothing of them"
            raise InputError(
                f"{self.path}: {what}; record it on a GPU with ProfilerActivity.CUDA and export_chrome_trace"
            )
        return Profile(
            path=self.path,
            gpus=self.gpus,
            facts=self.facts,
            ops=tuple(self.ops),
            launches=tuple(self.launches),
            calls=self.calls,
            steps=tuple(sorted(self.steps, key=lambda step: step.start_us)),
        )


def _launch(event: dict[str, Any], kind: LaunchKind, args: dict[str, Any]) -> GpuLaunch:
    return GpuLaunch(
        kind=kind,
        name=text_of(event["name"]),
        device=within(args.get("device", 0), _MOST),
        stream=within(args.get("stream", 0), _MOST),
        start_us=_time(event["ts"]),
        duration_us=_duration(event["dur"]),
        correlation=_whole(args.get("correlation", 0)),
        external=_integer(args.get("External id")),
        grid=_triple(args.get("grid")),
        block=_triple(args.get("block")),
        shared_bytes=within(args.get("shared memory", 0), _MOST),
        moved_bytes=within(args.get("bytes", 0), 1 << 50),
    )


def _shown(shape: Any, kind: str, text: str) -> list[Shown]:
    """One argument; a list of tensors gives one entry for each, of a dtype that the profile does not tell."""
    if kind == "TensorList":
        return [Shown(dtype="", shape=shape_of(item), text="") for item in shape]
    dtype = DTYPES.get(kind)
    if dtype is None:
        return [Shown(dtype=None, shape=(), text=text_of(text))]
    return [Shown(dtype=dtype, shape=shape_of(shape), text="")]


def text_of(value: Any) -> str:
    """Text without characters that no file could hold."""
    return str(value).encode("utf-8", "replace").decode()


def within(value: Any, most: int) -> int:
    """A whole number from 0 to ``most``; raises :class:`ValueError` for any other."""
    number = _whole(value)
    if not 0 <= number <= most:
        raise ValueError(f"{number} is out of range")
    return number


def shape_of(value: Any) -> tuple[int, ...]:
    """Extents of a tensor of at most 2**50 elements; raises :class:`ValueError` for others."""
    shape = tuple(within(extent, 1 << 50) for extent in value)
    within(math.prod(shape), 1 << 50)
    return shape


def _whole(value: Any) -> int:
    """A whole number as JSON writes it, or its digits; what would have to be rounded is refused."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = int(value)
    if isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise ValueError(f"{value!r} is no whole number")
    return number


def _time(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not abs(number) <= _LATEST_US:
        raise ValueError(f"{value!r} is no time in microseconds")
    return number


def _duration(value: Any) -> float:
    number = _time(value)
    if not 0 <= number <= _LONGEST_US:
        raise ValueError(f"{value!r} microseconds is no time that a launch takes")
    return number


def _thread(event: dict[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _integer(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _triple(value: Any) -> tuple[int, int, int]:
    numbers = [max(1, within(number, _MOST)) for number in value] if isinstance(value, list) else []
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z
