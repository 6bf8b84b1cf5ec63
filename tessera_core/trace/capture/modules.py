"""What launched functions were loaded from: PTX through Triton's public hooks, else a binary known by name.

Libraries generate different binaries under one name; the second and later ones get a module row without text.
"""

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
    """A module as its compiler wrote it, without debug lines. ``name``: hash of its normalised text.

    Of a binary (``text`` empty), the hash of a function's name and its number among those so named.
    """

    name: str
    raw_hash: str
    text: str

    def row(self, architecture: str) -> dict[str, Any]:
        """Its row of the table ``modules``."""
        return {
            "module": self.name,
            "raw_hash": self.raw_hash,
            "architecture": architecture,
            "language": "ptx" if self.text else "cubin",
            "source_hash": "",
            "text": self.text,
        }


@dataclass(slots=True)
class ModuleBook:
    """Modules by the handle of the function that was loaded from them, and the handle's entry name."""

    by_handle: dict[int, LoadedModule] = field(default_factory=dict)
    _by_text: dict[str, LoadedModule] = field(default_factory=dict)
    _named: dict[str, list[int]] = field(default_factory=dict)

    def add(self, handle: int, text: str) -> None:
        """Remember that the function ``handle`` was loaded from the PTX ``text``."""
        clean = without_lines(text)
        if clean not in self._by_text:
            raw = hashlib.sha256(text.encode()).hexdigest()
            self._by_text[clean] = LoadedModule(module_hash(clean), raw, clean)
        self.by_handle[handle] = self._by_text[clean]

    def meet(self, handle: int, function: str) -> str | None:
        """The module of a launched function; None for the only binary (or the first) of its name."""
        if handle not in self.by_handle:
            same = self._named.setdefault(function, [])
            if handle not in same:
                same.append(handle)
            number = same.index(handle)
            if number:
                name = hashlib.sha256(f"{function}#{number}".encode()).hexdigest()
                self.by_handle[handle] = LoadedModule(name, name, "")
        module = self.by_handle.get(handle)
        return None if module is None else module.name

    def has_ptx(self, handle: int) -> bool:
        """Whether the function's PTX is known."""
        return handle in self.by_handle and bool(self.by_handle[handle].text)

    def names(self) -> dict[int, str]:
        """Module hashes by function handle."""
        return {handle: module.name for handle, module in self.by_handle.items()}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Add every Triton kernel that is loaded inside, or launched: a process loads one only once."""
        from triton import knobs
        from triton.runtime.jit import JITFunction

        def loaded(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
            for file, path in (metadata_group or {}).items():
                if str(file).endswith(".ptx"):
                    self.add(int(function), Path(path).read_text(encoding="utf-8"))

        run = JITFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            made = run(kernel, *args, **kwargs)
            if made is not None and int(made.function) not in self.by_handle:
                self.add(int(made.function), made.asm["ptx"])
            return made

        hook = knobs.runtime.kernel_load_end_hook
        hook.add(loaded)
        JITFunction.run = launched
        try:
            yield
        finally:
            JITFunction.run = run
            hook.remove(loaded)
