"""What this machine has to compute on: memory, GPUs as CUDA reports them, and the devices that a cluster file lists.

PyTorch is imported when GPUs are asked for; a machine without it, or without CUDA, has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera_core.devices.cpu import CpuDevice

GIGABYTE = 1_000_000_000

_CGROUP = "sys/fs/cgroup"
_UNLIMITED = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """A GPU: PyTorch's number, the name that CUDA reports, bytes free now, and its multiprocessors."""

    index: int
    name: str
    free_bytes: int
    multiprocessors: int

    @property
    def torch_name(self) -> str:
        """How bindings and PyTorch call it."""
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A device of a cluster file and where it is: a CPU worker, or a GPU (also of which it is a slice)."""

    name: str
    type: str
    memory_bytes: int | None
    domain: str
    hardware: str
    cpu: CpuDevice | None = None
    gpu: FoundGpu | None = None

    def row(self, host: str) -> dict[str, Any]:
        """As the cluster file states it."""
        memory = {} if self.memory_bytes is None else {"memory_gb": round(self.memory_bytes / GIGABYTE, 2)}
        return {
            "name": self.name,
            "type": self.type,
            **memory,
            "memory_domain": self.domain,
            "host": host,
            "hardware": self.hardware,
        }


def found_gpus() -> tuple[FoundGpu, ...]:
    """The GPUs that PyTorch can use; asking takes a few hundred megabytes of each, which are not counted free."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        gpus.append(
            FoundGpu(
                index=index,
                name=properties.name,
                free_bytes=free,
                multiprocessors=properties.multi_processor_count,
            )
        )
    return tuple(gpus)


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether a driver for NVIDIA GPUs is loaded, be PyTorch able to use it or not."""
    return (root / "dev/nvidiactl").exists()


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that new work can have without swapping; None where the system doesn't say.

    ``MemAvailable`` of proc(5), or what the control group's limit (cgroup v2, ``memory.max``) leaves if that is less.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    try:
        limit = (root / _CGROUP / "memory.max").read_text(encoding="utf-8").strip()
        used = int((root / _CGROUP / "memory.current").read_text(encoding="utf-8"))
        return available if limit == _UNLIMITED else max(0, min(available, int(limit) - used))
    except (OSError, ValueError):
        return available
