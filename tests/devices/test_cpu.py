import os
from pathlib import Path

import pytest

from tessera_core.devices.cpu import CpuDevice, cpu_device, processor_name, usable_cpus
from tessera_formats.errors import InputError


def test_a_name_counts_usable_cpus_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 4})
    assert usable_cpus() == (4, 9)
    assert cpu_device("cpu:0") == CpuDevice(0, 4)
    assert cpu_device("cpu:1") == CpuDevice(1, 9)
    assert cpu_device("cpu:1").name == "cpu:1"
    with pytest.raises(InputError, match=r"cpu:2: this process may use 2 CPUs, so name cpu:0 to cpu:1"):
        cpu_device("cpu:2")


@pytest.mark.parametrize("name", ["cpu", "cpu:", "cpu:-1", "cpu:01", "cuda:0", "", "cpu:0 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="write it as cpu:0"):
        cpu_device(name)


def test_pinning_binds_this_thread() -> None:
    before = os.sched_getaffinity(0)
    device = cpu_device("cpu:0")
    try:
        device.pin()
        assert os.sched_getaffinity(0) == {device.number}
    finally:
        os.sched_setaffinity(0, before)


def test_the_processor_is_named_as_the_kernel_reports_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Fast One\n\nprocessor\t: 1\n"
    )
    assert processor_name(info) == "Fast One (family 26 model 2)"
    info.write_text("processor\t: 0\n")
    assert processor_name(info) == "unknown CPU"
    assert processor_name(tmp_path / "none") == "unknown CPU"
