"""PTX of the Triton kernels that are loaded while something runs, through Triton's public hooks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera_core.ptx.normalise import module_hash
from tessera_core.trace.compile_ptx import without_lines


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A module as its compiler wrote it, without debug lines. ``name``: hash of its normalised text."""

    name: str
    raw_hash: str
    text: str

    def row(self, architecture: str) -> dict[str, Any]:
        """Its row of the table ``modules``."""
        return {
            "module": self.name,
            "raw_hash": self.raw_hash,
            "architecture": architecture,
            "language": "ptx",
            "source_hash": "",
            "text": self.text,
        }


@dataclass(slots=True)
class ModuleBook:
    """Modules by the handle of the function that was loaded from them, and the handle's entry name."""

    by_handle: dict[int, LoadedModule] = field(default_factory=dict)
    _by_text: dict[str, LoadedModule] = field(default_factory=dict)

    def add(self, handle: int, text: str) -> None:
        """Remember that the function ``handle`` was loaded from the PTX ``text``."""
        clean = without_lines(text)
        if clean not in self._by_text:
            raw = hashlib.sha256(text.encode()).hexdigest()
            self._by_text[clean] = LoadedModule(module_hash(clean), raw, clean)
        self.by_handle[handle] = self._by_text[clean]

    def names(self) -> dict[int, str]:
        """Module hashes by function handle."""
        return {handle: module.name for handle, module in self.by_handle.items()}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Add every Triton kernel that is loaded inside."""
        from triton import knobs

        def loaded(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
            for file, path in (metadata_group or {}).items():
                if str(file).endswith(".ptx"):
                    self.add(int(function), Path(path).read_text(encoding="utf-8"))

        hook = knobs.runtime.kernel_load_end_hook
        hook.add(loaded)
        try:
            yield
        finally:
            hook.remove(loaded)
