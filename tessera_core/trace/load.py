"""Importing a module by its file, the same way in every process: packages as packages, scripts by their stem."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tessera_core.trace.declare import undecorated


def import_file(file: Path, name: str) -> ModuleType:
    """The module called ``name`` whose source is ``file``; anything that it raises passes through."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.parent)
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if added:
            sys.path.remove(folder)
    return module


def find_kernel(job: dict[str, Any]) -> Any:
    """The ``@triton.jit`` function that ``module``, ``file`` and ``qualname`` of a job name."""
    try:
        module = importlib.import_module(job["module"])
        if str(Path(str(module.__file__)).resolve()) != job["file"]:
            raise ImportError(job["module"])
    except ImportError:
        module = import_file(Path(job["file"]), job["module"])
    found: Any = module
    for part in job["qualname"].split("."):
        found = getattr(found, part)
    return undecorated(found)
