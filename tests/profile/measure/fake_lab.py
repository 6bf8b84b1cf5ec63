"""A lab without a device: work runs on the CPU when it is launched, and a made-up clock tells how long it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class FakeReplay:
    work: Callable[[], object]
    lab: FakeLab

    def replay(self) -> None:
        with torch.no_grad():
            self.work()


@dataclass
class FakeLab:
    """``runs_us``: how long each replay takes. ``busy``: work was enqueued and not waited for."""

    device: str = "cpu"
    cache_bytes: int = 1 << 16
    fixed_us: float = 3.0
    runs_us: Callable[[FakeReplay], float] = lambda replay: 100.0
    now_us: float = 0.0
    flushes: int = 0
    busy: bool = False
    launched: list[FakeReplay] = field(default_factory=list)

    def run(self, work: Callable[[], Any]) -> Any:
        with torch.no_grad():
            return work()

    def record(self, work: Callable[[], object]) -> FakeReplay:
        with torch.no_grad():
            work()
        return FakeReplay(work, self)

    def launch(self, replay: FakeReplay) -> None:
        self.launched.append(replay)
        self.busy = True
        replay.replay()
        self.now_us += self.fixed_us + self.runs_us(replay)

    def mark(self) -> Any:
        return self.now_us

    def after(self, mark: Any) -> None:
        self.now_us = max(self.now_us, mark)

    def passed(self, mark: Any) -> bool:
        return False

    def space(self) -> None:
        self.now_us += 200

    def flush(self) -> None:
        self.flushes += 1

    def settle(self) -> None:
        self.busy = False

    def microseconds(self, begin: Any, end: Any) -> float:
        return end - begin
