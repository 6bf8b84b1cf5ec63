"""What is planned: models traced without memory, with modelled or tabled times, and clusters of 2 to 16 devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera_core.deps.graph import load_deps
from tessera_core.plan.cluster import Cluster, resolve_cluster
from tessera_core.plan.predict import Origin
from tessera_core.plan.setting import Setting
from tessera_core.plan.stage import memory_of
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.merge import load_profiles
from tessera_core.program.store import load_trace

PHASES = ("prefill:batch=1,context=1024", "decode:batch=64,context=1024")
MODELS: dict[str, tuple[str, ...]] = {
    "llama-3-8b": PHASES,
    "gpt-oss-20b": PHASES,
    "mamba-codestral-7b": PHASES,
    "stable-diffusion-3.5-medium": ("step:batch=2,context=128",),
    "deepseek-v3": PHASES[1:],
}
"""Model and its programs."""
BETWEEN_GBIT_PER_S = (200, 25)
WITHIN: dict[str, tuple[int, int]] = {
    "a100-80gb": (2400, 3),
    "l40s": (256, 5),
    "h100-sxm": (3600, 3),
    "b200-sxm": (7200, 3),
}
"""Links between two devices of a type: Gbit/s and latency in microseconds. NVLink, and PCIe for the L40S."""
BETWEEN_LATENCY_US = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cluster: how many devices of which type. ``slots``: batches in flight to plan for."""

    name: str
    counts: tuple[tuple[str, int], ...]
    slots: int

    @property
    def devices(self) -> int:
        """How many there are."""
        return sum(count for _, count in self.counts)

    def cluster(self, between_gbit_per_s: int, memory_of_type: Any) -> Cluster:
        """The cluster with links of this rate between types."""
        types = [kind for kind, _ in self.counts]
        content: dict[str, Any] = {
            "device": [{"name": kind, "type": kind, "count": count} for kind, count in self.counts],
            "link": [
                {
                    "between": [kind, other],
                    "gbit_per_s": WITHIN[kind][0] if kind == other else between_gbit_per_s,
                    "latency_us": WITHIN[kind][1] if kind == other else BETWEEN_LATENCY_US,
                }
                for index, kind in enumerate(types)
                for other in types[index:]
            ],
        }
        return resolve_cluster(content, self.name, lambda *_: None, memory_of_type)


SHAPES = (
    Shape(name="A100 + L40S", counts=(("a100-80gb", 1), ("l40s", 1)), slots=4),
    Shape(name="2 A100 + L40S", counts=(("a100-80gb", 2), ("l40s", 1)), slots=6),
    Shape(name="2 A100 + 2 L40S", counts=(("a100-80gb", 2), ("l40s", 2)), slots=8),
    Shape(
        name="A100 + L40S + H100 + B200",
        counts=(("a100-80gb", 1), ("l40s", 1), ("h100-sxm", 1), ("b200-sxm", 1)),
        slots=8,
    ),
    Shape(name="4 B200 + 4 H100", counts=(("b200-sxm", 4), ("h100-sxm", 4)), slots=16),
    Shape(name="8 B200 + 8 H100", counts=(("b200-sxm", 8), ("h100-sxm", 8)), slots=32),
)


def make(folder: Path, model: str) -> None:
    """Trace, dependencies and profile of a model, each kept where it is there already."""
    trace, deps, profile = (folder / f"{model}{end}" for end in (".trace", ".deps", ".profile.arrow"))
    programs = [word for program in MODELS[model] for word in ("--program", program)]
    devices = [word for kind in WITHIN for word in ("--device", kind)]
    commands: tuple[tuple[Path, list[str | Path]], ...] = (
        (trace, ["trace", model, "--fake", *programs, "-o", trace]),
        (deps, ["ptx-deps", trace, "-o", deps]),
        (profile, ["profile", trace, *devices, "-o", profile]),
    )
    for path, command in commands:
        if not path.exists():
            _tessera(command)


def _tessera(words: Sequence[str | Path]) -> None:
    command = [sys.executable, "-m", "tessera_cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model's artifacts, read."""

    name: str
    trace: Any
    deps: Any
    times: Any

    def setting(self, shape: Shape, between_gbit_per_s: int) -> Setting:
        """What the planner starts from on a cluster."""
        cluster = shape.cluster(between_gbit_per_s, memory_of(self.times, catalogue()))
        origin = Origin(
            trace=self.trace,
            deps=self.deps,
            times=self.times,
            cluster=cluster,
            policy="throughput",
            digests={},
            targets=self.deps.targets,
        )
        return Setting(origin=origin, in_flight=None, output_tokens=None)


def load(folder: Path, model: str) -> Subject:
    """Read what :func:`make` made."""
    return Subject(
        name=model,
        trace=load_trace(folder / f"{model}.trace"),
        deps=load_deps(folder / f"{model}.deps"),
        times=load_profiles([folder / f"{model}.profile.arrow"]),
    )
