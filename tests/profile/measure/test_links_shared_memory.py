import math
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from tessera_core.devices.cpu import CpuDevice
from tessera_core.execute.process import child
from tessera_core.profile.measure import links_shared_memory as links
from tessera_core.profile.measure.links import SIZES_BYTES
from tessera_core.profile.measure.links_shared_memory import LinkSamples, fit_link
from tessera_formats.errors import DeviceLostError


def samples() -> LinkSamples:
    sizes = np.repeat(SIZES_BYTES, 5).astype(np.int64)
    return LinkSamples(
        size_bytes=sizes,
        copy_us=2.0 + sizes / 5000,
        post_us=np.full(len(sizes), 3.0),
        wake_us=np.full(len(sizes), 10.0),
        read_us=np.array([1.5]),
        answer_us=np.array([0.5]),
    )


def test_a_link_keeps_apart_what_each_end_pays() -> None:
    link = fit_link(samples(), "cpu-1thread")
    assert math.isclose(link.gbit_per_s, 40.0, rel_tol=1e-6)  # 5,000 bytes a microsecond
    assert math.isclose(link.send_us, 2.0 + 3.0 + 1.5, rel_tol=1e-6)  # call, message, reading the answer
    assert link.receive_us == 2.0
    assert link.latency_us == 10.0
    assert (link.source, link.destination, link.occupies_sender) == ("cpu-1thread", "cpu-1thread", True)
    assert link.samples == 30


def test_the_residual_says_how_far_the_line_is_off() -> None:
    assert fit_link(samples(), "t").residual < 0.15  # reading the answer is not in the one-way time
    bent = replace(
        samples(), copy_us=2.0 + samples().size_bytes / 5000 * np.where(samples().size_bytes > 1e5, 3, 1)
    )
    assert fit_link(bent, "t").residual > fit_link(samples(), "t").residual


@pytest.mark.serial
def test_a_link_between_two_workers_is_measured() -> None:
    from tessera_core.devices.cpu import cpu_device, usable_cpus
    from tessera_core.profile.measure.links_shared_memory import measure_link

    if len(usable_cpus()) < 2:
        pytest.skip("needs two CPUs: this process may use one")
    link = measure_link(cpu_device("cpu:0"), cpu_device("cpu:1"), "cpu-1thread", 0.2)
    assert 0.1 < link.latency_us < 10_000
    assert 1 < link.gbit_per_s < 10_000
    assert link.origin == "measured" and link.samples >= 100


def end_with(connection: Connection, code: int) -> None:
    """What a measuring process does that dies at once, or (code 0) never answers."""
    os._exit(code) if code else time.sleep(60)


@pytest.mark.serial
@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_dies_ends_the_measurement(dying: int) -> None:
    with ExitStack() as stack:
        ends = [
            links._NearEnd(
                CpuDevice(number, 0), stack.enter_context(child(end_with, 3 if number == dying else 0))
            )
            for number in range(2)
        ]
        with pytest.raises(DeviceLostError, match=rf"cpu:{dying} was lost.*exit code 3"):
            links._exchange(ends)
    assert all(end.child.process.returncode is not None for end in ends)
