"""What can be traced besides models in code: programs that ``torch.export`` saved, and profiles that PyTorch's
profiler recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

InputKind = Literal["export", "kineto", "model"]


def input_kind(model: str) -> InputKind:
    """What the command line's MODEL names, by its ending: a ``.pt2``, a profile, or a model in code."""
    name = Path(model).name.lower()
    if name.endswith(".pt2"):
        return "export"
    return "kineto" if name.endswith((".json", ".json.gz")) else "model"
