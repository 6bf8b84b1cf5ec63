"""Streams and events of the user's code while it is traced: stand-ins that note which order the code states.

Ops run one after the other on the CPU, so a stream is only a number here, and an event is how far every stream
had come when it was recorded. The order that results is CUDA's: an op follows the earlier ops of its stream and
whatever an event that was waited for stands for; a host synchronisation orders all that follows it after all that
it waited for; a wait for an event that was never recorded orders nothing. Side streams do not wait for the main
one by themselves. As in a CUDA graph, each must be forked from the main stream and joined to it within the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from tessera_core.program.ir import StreamWait
from tessera_core.trace.place import calling_place
from tessera_formats.errors import ModelError, UntracedLaunchError

Clock = dict[int, int]
"""By stream, the last op that is certainly done; -1: the stream's beginning (of the main one, the step's)."""

MAIN = 0
"""Number of the stream on which a step begins and ends."""


class SymbolicStream:
    """Stands for a ``torch.cuda.Stream`` or ``torch.Stream``, with the methods of these."""

    __slots__ = ("main",)

    def __init__(self, main: bool = False) -> None:
        self.main = main

    # The main stream of one step is that of every other.
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SymbolicStream) and self.main and other.main)

    def __hash__(self) -> int:
        return hash("main") if self.main else id(self)

    # What real code asks with isinstance; the stand-in of torch.Stream answers for itself.
    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return torch.cuda.Stream

    @property
    def device(self) -> torch.device:
        """Where the step runs: on the CPU."""
        return torch.device("cpu")

    @property
    def device_index(self) -> int:
        """There is one device."""
        return 0

    @property
    def priority(self) -> int:
        """That of a stream for which none was asked; priorities order nothing."""
        return 0

    def wait_stream(self, stream: SymbolicStream) -> None:
        """What is issued here from now on follows all that was issued there."""
        here = _timeline()
        here.wait(self, here.snapshot(stream))

    def wait_event(self, event: SymbolicEvent) -> None:
        """What is issued here from now on follows what the event was recorded after."""
        event.wait(self)

    def record_event(self, event: SymbolicEvent | None = None) -> SymbolicEvent:
        """An event that stands for all that was issued here so far."""
        event = SymbolicEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """What is issued anywhere from now on follows all that was issued here."""
        here = _timeline()
        here.wait_on_host(here.snapshot(self))

    def query(self) -> NoReturn:
        """Refused: the answer depends on timing."""
        _refuse("Stream.query", "its answer depends on timing; wait instead")

    def __enter__(self) -> SymbolicStream:
        _timeline().enter(self)
        return self

    def __exit__(self, *problem: object) -> None:
        _timeline().leave()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("cuda_stream", "native_handle", "stream_id"):
            _refuse(
                f"Stream.{name}",
                "work would be issued outside the recorded ops; register the call as a custom op"
                " (torch.library.custom_op)",
            )
        raise AttributeError(f"a stream has no attribute {name!r} while it is traced")


class SymbolicEvent:
    """Stands for a ``torch.cuda.Event`` or ``torch.Event``, with the methods of these."""

    __slots__ = ("_clock", "_home")

    def __init__(self) -> None:
        self._home: Timeline | None = None
        self._clock: Clock = {}

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return torch.cuda.Event

    def record(self, stream: SymbolicStream | None = None) -> None:
        """Stand for all that was issued so far on ``stream``, or else on the current one."""
        self._home = _timeline()
        self._clock = self._home.snapshot(self._home.current if stream is None else stream)

    def wait(self, stream: SymbolicStream | None = None) -> None:
        """Let ``stream``, or else the current one, wait for it."""
        here = _timeline()
        # What an earlier step recorded is done before this one begins.
        if self._home is here:
            here.wait(here.current if stream is None else stream, self._clock)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        here = _timeline()
        if self._home is here:
            here.wait_on_host(self._clock)

    def query(self) -> NoReturn:
        """Refused: the answer depends on timing."""
        _refuse("Event.query", "its answer depends on timing; wait instead")

    def elapsed_time(self, end: object) -> NoReturn:
        """Refused: there is no time while tracing."""
        _refuse("Event.elapsed_time", "there is no time while tracing; leave it out of the step")


@dataclass(slots=True)
class Timeline:
    """One step's streams: the current one, and how far each certainly follows the others.

    ``waits``: orders between ops of different streams, as few as say it all.
    """

    waits: list[StreamWait] = field(default_factory=list)
    _stack: list[SymbolicStream] = field(default_factory=lambda: [SymbolicStream(main=True)])
    _numbers: dict[SymbolicStream, int] = field(default_factory=lambda: {SymbolicStream(main=True): MAIN})
    _clocks: dict[SymbolicStream, Clock] = field(
        default_factory=lambda: {SymbolicStream(main=True): {MAIN: -1}}
    )
    _host: Clock = field(default_factory=dict)
    _after: list[Clock] = field(default_factory=list)  # by op: what is done once it is

    @property
    def current(self) -> SymbolicStream:
        """The stream on which ops are issued now."""
        return self._stack[-1]

    def select(self, stream: SymbolicStream) -> None:
        """Make ``stream`` the current one, until the enclosing ``with`` ends."""
        self._stack[-1] = stream

    def enter(self, stream: SymbolicStream | None) -> None:
        """Make ``stream`` the current one until :meth:`leave`; None changes nothing."""
        self._stack.append(self.current if stream is None else stream)

    def leave(self) -> None:
        """Undo the last :meth:`enter`."""
        self._stack.pop()

    def snapshot(self, stream: SymbolicStream) -> Clock:
        """All that work issued on ``stream`` now would follow, and what was issued there."""
        return _later(self._clocks.get(stream, {}), self._host)

    def wait(self, stream: SymbolicStream, done: Clock) -> None:
        """What is issued on ``stream`` from now on follows ``done``."""
        self._clocks[stream] = _later(self._clocks.get(stream, {}), done)

    def wait_on_host(self, done: Clock | None = None) -> None:
        """What is issued from now on follows ``done``; None: all that was issued."""
        for clock in self._clocks.values() if done is None else (done,):
            self._host = _later(self._host, clock)

    def issue(self, op: str) -> int:
        """Note the next op, on the current stream; the stream's number, dense in order of first use.

        Raises :class:`ModelError` for a stream that was never told to wait for the step's beginning.
        """
        stream = self.current
        done = self.snapshot(stream)
        if MAIN not in done:
            raise ModelError(
                f"{op} at {calling_place()}: runs on a side stream that does not wait for what came before the"
                " step; call wait_stream(torch.cuda.current_stream()) on it before it is used"
            )
        number = self._numbers.setdefault(stream, len(self._numbers))
        index = len(self._after)
        known = self._after[done[number]] if done.get(number, -1) >= 0 else {}
        needed = {s: o for s, o in done.items() if s != number and o > known.get(s, -1)}
        self.waits += [
            StreamWait(source=earlier, destination=index)
            for other, earlier in sorted(needed.items())
            if not any(self._after[o].get(other, -1) >= earlier for s, o in needed.items() if s != other)
        ]
        self._after.append({**done, number: index})
        self._clocks[stream] = {**done, number: index}
        return number

    def unjoined(self) -> int | None:
        """The last op of a stream that the main one does not follow at the step's end; None: all are joined."""
        end = self.snapshot(SymbolicStream(main=True))
        for stream, number in self._numbers.items():
            last = self._clocks.get(stream, {}).get(number, -1)
            if last > end.get(number, -1):
                return last
        return None


_ACTIVE: ContextVar[Callable[[], Timeline] | None] = ContextVar("streams", default=None)


@contextlib.contextmanager
def symbolic_streams(timeline: Callable[[], Timeline] | None = None) -> Iterator[None]:
    """Let PyTorch's stream functions work on ``timeline()`` inside; by default one that nobody looks at.

    Only PyTorch's own names are replaced, each by one that asks at every call whether it is inside: what user code
    has imported from there keeps working on a real device afterwards.
    """
    scratch = Timeline()
    token = _ACTIVE.set(timeline or (lambda: scratch))
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, make in _REPLACED:
                stack.enter_context(_replaced(owner, name, make))
            yield
    finally:
        _ACTIVE.reset(token)


def _timeline() -> Timeline:
    active = _ACTIVE.get()
    if active is None:
        raise ModelError(
            f"a stream made while tracing is used at {calling_place()}, where nothing is traced; make streams in"
            " the factory or in the step, not when the file is imported"
        )
    return active()


def _refuse(call: str, reason: str) -> NoReturn:
    raise UntracedLaunchError(f"{call} at {calling_place()}: {reason}")


def _later(first: Clock, second: Clock) -> Clock:
    return {stream: max(first.get(stream, -1), second.get(stream, -1)) for stream in {**first, **second}}


Replacement = Callable[..., Any]


class _Door(type):
    """A class in whose place another may be made; both are its instances."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return vars(cls)["chosen"].__func__(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return issubclass(type(value), (vars(cls)["original"], vars(cls)["stand_in"]))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Replacement) -> Iterator[None]:
    """Let ``owner.name`` be ``replacement`` inside; where nothing is traced, that calls the original."""
    inherited = name not in vars(owner)
    original = None if inherited else vars(owner)[name]
    callee = getattr(owner, name, None)  # a build without CUDA lacks some

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if _ACTIVE.get() is not None:
            return replacement(*args, **kwargs)
        if callee is None:
            raise AttributeError(f"{owner.__name__} has no attribute {name!r}")
        return callee(*args, **kwargs)

    door: Any = staticmethod(chosen) if name == "__new__" else chosen
    if isinstance(callee, type):
        door = _Door(
            callee.__name__,
            (),
            {"original": callee, "stand_in": _STAND_INS.get(name, ()), "chosen": staticmethod(chosen)},
        )
    setattr(owner, name, door)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _new_stream(*args: Any, **kwargs: Any) -> SymbolicStream:
    return SymbolicStream()


def _new_event(*args: Any, **kwargs: Any) -> SymbolicEvent:
    return SymbolicEvent()


def _external_stream(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse(
        "torch.cuda.ExternalStream", "a stream of another library cannot be traced; use torch.cuda.Stream"
    )


def _current_stream(device: object = None) -> SymbolicStream:
    return _timeline().current


def _default_stream(device: object = None) -> SymbolicStream:
    return SymbolicStream(main=True)


def _set_stream(stream: SymbolicStream | None) -> None:
    if stream is not None:
        _timeline().select(stream)


def _synchronize(device: object = None) -> None:
    _timeline().wait_on_host()


def _record_stream(tensor: torch.Tensor, stream: object) -> None:
    """Nothing to do: it tells the allocator what a trace knows from the ops."""


def _keep_stream(context: Any, stream: SymbolicStream | None) -> None:
    context.stream = stream


def _enter(context: Any) -> None:
    _timeline().enter(context.stream)


def _exit(context: Any, *problem: object) -> None:
    _timeline().leave()


def _priority_range() -> tuple[int, int]:
    return 0, 0


class _OneDevice:
    """Stands for ``torch.cuda.device`` and ``torch.cuda.device_of``: all devices are the one that is traced."""

    def __init__(self, device: object) -> None:
        """Nothing to keep."""

    def __enter__(self) -> None:
        """Nothing to select."""

    def __exit__(self, *problem: object) -> None:
        """Nothing to undo."""


def _set_device(device: object) -> None:
    """Nothing to select."""


def _current_device() -> int:
    return 0


def _mark(message: object, *details: object) -> None:
    """Nothing to do: a profiler's marks are no part of a program."""


def _push(message: object, *details: object) -> int:
    return 0


def _pop() -> int:
    return 0


_STAND_INS: dict[str, type] = {"Stream": SymbolicStream, "Event": SymbolicEvent}

_REPLACED: tuple[tuple[Any, str, Replacement], ...] = (
    (torch.cuda.Stream, "__new__", _new_stream),
    (torch.cuda.ExternalStream, "__new__", _external_stream),
    (torch.cuda.Event, "__new__", _new_event),
    (torch.cuda.StreamContext, "__init__", _keep_stream),
    (torch.cuda.StreamContext, "__enter__", _enter),
    (torch.cuda.StreamContext, "__exit__", _exit),
    (torch.cuda.Stream, "priority_range", _priority_range),
    (torch.cuda, "device", _OneDevice),
    (torch.cuda, "device_of", _OneDevice),
    (torch.cuda, "set_device", _set_device),
    (torch.cuda, "current_device", _current_device),
    (torch.cuda.nvtx, "range_push", _push),
    (torch.cuda.nvtx, "range_pop", _pop),
    (torch.cuda.nvtx, "mark", _mark),
    (torch.cuda, "current_stream", _current_stream),
    (torch.cuda, "default_stream", _default_stream),
    (torch.cuda, "set_stream", _set_stream),
    (torch.cuda, "synchronize", _synchronize),
    (torch.accelerator, "current_stream", _current_stream),
    (torch.accelerator, "set_stream", _set_stream),
    (torch.accelerator, "synchronize", _synchronize),
    (torch, "Stream", _new_stream),
    (torch, "Event", _new_event),
    (torch.Tensor, "record_stream", _record_stream),
)
