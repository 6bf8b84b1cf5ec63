from pathlib import Path

import pytest

from tessera_core.devices.here import available_memory_bytes, found_gpus, has_nvidia_driver


def system(root: Path, meminfo: str | None, limit: str | None = None, used: str = "0") -> Path:
    (root / "proc").mkdir(parents=True)
    if meminfo is not None:
        (root / "proc/meminfo").write_text(meminfo)
    if limit is not None:
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(used)
    return root


MEMINFO = "MemTotal:       2000 kB\nMemFree:  10 kB\nMemAvailable:    1000 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "expected"),
    [
        (MEMINFO, None, "0", 1_024_000),
        (MEMINFO, "max\n", "5\n", 1_024_000),
        (MEMINFO, "500000\n", "100000\n", 400_000),
        (MEMINFO, "5000000\n", "0\n", 1_024_000),
        (MEMINFO, "5000\n", "9000\n", 0),
        (MEMINFO, "what", "0", 1_024_000),
        ("MemTotal: 2000 kB\n", None, "0", None),
        ("MemAvailable:\n", None, "0", None),
        (None, None, "0", None),
    ],
)
def test_available_memory(
    tmp_path: Path, meminfo: str | None, limit: str | None, used: str, expected: int | None
) -> None:
    assert available_memory_bytes(system(tmp_path / "root", meminfo, limit, used)) == expected


def test_a_driver_shows_itself(tmp_path: Path) -> None:
    assert not has_nvidia_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_nvidia_driver(tmp_path)


def test_this_machine_has_memory() -> None:
    assert (available_memory_bytes() or 0) > 1_000_000


@pytest.mark.gpu
def test_gpus_are_found_with_what_is_free() -> None:
    gpu = found_gpus()[0]
    assert gpu.torch_name == "cuda:0" and gpu.name
    assert gpu.free_bytes > 0 and gpu.multiprocessors > 0
