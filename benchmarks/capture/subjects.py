"""What is captured: each family's tiny twin, and a few layers of each at real width."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera_core.program.ir import Trace
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import BuiltModel
from tessera_core.trace.fake import building, new_fake_mode
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.models import model_shape
from tessera_core.trace.models.shapes import Shape
from tessera_core.trace.request import parse_program
from tessera_core.trace.stage import package_versions

SMALL = ("prefill:batch=1,context=16", "decode:batch=4,context=64")
LARGE = ("prefill:batch=1,context=1024", "decode:batch=64,context=1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model's shape and the programs to capture. ``fake``: traced without memory. ``timed``: against the model."""

    shape: Shape
    programs: tuple[str, ...]
    fake: bool = False
    timed: bool = False

    @property
    def name(self) -> str:
        """The shape's name."""
        return self.shape.name

    def model(self, mode: FakeTensorMode | None) -> TraceableModel:
        """Build it; under a fake mode without memory."""
        module, _, builder = self.shape.builder.partition(":")
        made: TraceableModel
        with building(mode):
            made = getattr(importlib.import_module(module), builder)(
                self.shape, dtype=getattr(torch, self.shape.dtype), seed=0
            )
        return made

    def trace(self) -> Trace:
        """Trace all programs."""
        mode = new_fake_mode() if self.fake else None
        origin = {"model": self.name, "source": self.shape.source}
        return trace_model(
            BuiltModel(self.model(mode), origin, self.shape.dtype),
            [parse_program(program) for program in self.programs],
            seed=0,
            fake_mode=mode,
            versions=package_versions(),
        ).trace


def _tiny(name: str, *programs: str) -> Subject:
    return Subject(shape=model_shape(name), programs=programs or SMALL)


def _cut(model: str, layers: int, *programs: str, timed: bool = False, **changes: Any) -> Subject:
    """A few layers of a model at real width."""
    name = f"{model}-{layers}-layer{'s' if layers > 1 else ''}"
    shape: Shape = replace(model_shape(model), name=name, layers=layers, **changes)  # type: ignore[call-arg]
    return Subject(shape=shape, programs=programs or LARGE, fake=True, timed=timed)


SUBJECTS = (
    _tiny("llama-tiny"),
    _tiny("demo"),
    _tiny("qwen2.5-tiny"),
    _tiny("gpt-oss-tiny"),
    _tiny("qwen3-tiny"),
    _tiny("deepseek-tiny"),
    _tiny("mamba-codestral-tiny"),
    _tiny("qwen2.5-vl-tiny"),
    _tiny("stable-diffusion-3.5-tiny", "step:batch=2,context=16"),
    _cut("llama-3-8b", 4, timed=True),
    _cut("qwen2.5-32b", 1),
    # One layer that attends to everything, one with a window.
    _cut("gpt-oss-20b", 2),
    _cut("mamba-codestral-7b", 1),
    # A window and a whole image in the vision tower.
    _cut("qwen2.5-vl-7b", 1, vision_layers=2, vision_full_layers=(1,)),
    # One layer with the image's second attention, one without.
    _cut("stable-diffusion-3.5-medium", 2, "step:batch=2,context=128", dual_layers=1),
)


def subject(name: str) -> Subject:
    """The subject called ``name``."""
    return next(found for found in SUBJECTS if found.name == name)
