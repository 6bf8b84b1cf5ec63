"""Work on other threads is never lost in silence."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tessera_formats.errors import UntracedLaunchError

Tensors = dict[str, torch.Tensor]


def _result(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    x, found = net.embed(inputs["tokens"]), []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return {"y": found[0]}


def _state(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    thread = threading.Thread(target=lambda: state["cache"].add_(1))
    thread.start()
    thread.join()
    return {"y": net.embed(inputs["tokens"])}


def _pool(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    x = net.embed(inputs["tokens"])
    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(lambda factor: x * factor, (2, 3))
    return {"y": left + right}


def _host_read(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(int(inputs["tokens"][0, 0])))
    thread.start()
    thread.join()
    return {"y": net.embed(inputs["tokens"])}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("step", [_result, _state, _pool, _host_read])
def test_work_on_another_thread_is_refused(
    tracer: Callable[..., Any], step: Any, fake: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would look like a constant, or be missing."""
    with pytest.raises(UntracedLaunchError, match=r"test_threads.py:\d+: runs on a thread of its own"):
        tracer(step, fake)
    assert capfd.readouterr().err == ""


def test_other_threads_may_do_what_is_no_work(tracer: Callable[..., Any]) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x, found = net.embed(inputs["tokens"]), []
        thread = threading.Thread(target=lambda: found.append(x.view(-1)))
        thread.start()
        thread.join()
        return {"y": found[0] * 2}

    assert [op.target for op in tracer(step).trace.programs[0].ops][-1] == "aten.mul.Tensor"
    result: list[torch.Tensor] = []
    later = threading.Thread(target=lambda: result.append(torch.ones(2) * 2))
    later.start()
    later.join()
    assert result[0].tolist() == [2.0, 2.0]
