import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices.cpu import CpuDevice, cpu_device, usable_cpus
from tessera_core.profile.measure import links_distributed
from tessera_core.profile.measure.links import FINE_SIZES_BYTES
from tessera_core.profile.measure.links_distributed import End, MessageTimes, fit_messages, measure_messages
from tessera_formats.errors import DeviceLostError, InputError

SIZES = np.repeat(FINE_SIZES_BYTES, 3).astype(np.int64)


@given(st.floats(1, 500), st.floats(0, 1), st.floats(10, 1e5))
def test_a_message_takes_what_the_parts_of_the_link_add_up_to(
    latency_us: float, share: float, bytes_per_us: float
) -> None:
    """Whatever part of the start the sender pays, the one-way time is what was measured."""
    times = MessageTimes(
        size_bytes=SIZES,
        sending_us=share * latency_us + SIZES / bytes_per_us,
        arrival_us=latency_us + SIZES / bytes_per_us,
        late_us=np.array([3.0, 4.0, 5.0]),
    )
    link = fit_messages(times, "a", "b", "gloo")
    assert (link.source, link.destination, link.transport, link.receive_us) == ("a", "b", "gloo", 4.0)
    assert 0 <= link.send_us <= latency_us * (1 + 1e-6) and link.latency_us >= -1e-9
    assert link.residual < 1e-6
    for size in FINE_SIZES_BYTES:
        assert math.isclose(link.transfer_us(size), latency_us + size / bytes_per_us, rel_tol=1e-6)


def ends() -> tuple[End, End]:
    if len(usable_cpus()) < 2:
        pytest.skip("needs two CPUs: this process may use one")
    first, second = (
        End(name=f"cpu:{k}", device_type="cpu-1thread", cpu=cpu_device(f"cpu:{k}")) for k in range(2)
    )
    return first, second


@pytest.mark.serial
def test_gloo_between_two_processes_is_measured() -> None:
    link = measure_messages(*ends(), "gloo", 0.2)
    assert (link.origin, link.transport) == ("measured", "gloo")
    assert 1 < link.transfer_us(4096) < 100_000
    assert 0.1 < link.gbit_per_s < 10_000
    assert link.samples >= links_distributed.LEAST_ROUNDS * len(FINE_SIZES_BYTES)
    assert "16 MiB" in link.detail


@pytest.mark.serial
def test_an_interface_that_is_not_here_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(InputError, match=r"gloo between two processes: cpu:0 can't use it here \(.+\)"):
        measure_messages(*ends(), "gloo", 0.2)


@pytest.mark.serial
def test_a_process_that_dies_is_named() -> None:
    """Pinning to a CPU that does not exist ends the process before it can say anything."""
    _, second = ends()
    nowhere = End(name="cpu:999", device_type="cpu-1thread", cpu=CpuDevice(999, max(usable_cpus()) + 4096))
    with pytest.raises(DeviceLostError, match=r"process on cpu:999 was lost while gloo was measured"):
        measure_messages(nowhere, second, "gloo", 0.2)


@pytest.mark.gpu
def test_nccl_between_two_gpus_is_measured() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: this machine has one")
    first, second = (End(name=f"cuda:{k}", device_type="gpu", gpu=f"cuda:{k}") for k in range(2))
    link = measure_messages(first, second, "nccl", 1.0)
    assert link.transport == "nccl" and link.gbit_per_s > 8
