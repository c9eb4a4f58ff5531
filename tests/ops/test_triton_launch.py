"""A kernel runs on the device of its tensors, whichever device is the current one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mbd_core.engine.step.report import HostCopy
from mbd_core.ops.launch import launch


class Kernel:
    """Records on which device it is launched."""

    def __init__(self) -> None:
        self.current: list[torch.device | None] = [None]
        self.launched: list[torch.device | None] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append(self.current[-1])

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        self.current.append(device)
        return nullcontext()


def test_a_kernel_runs_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(torch.cuda, "device", kernel.device)
    launch(kernel, (1,), torch.zeros(1))
    with FakeTensorMode():
        launch(kernel, (1,), torch.empty(1, device="cuda:1"), 3)
    assert kernel.launched == [None, torch.device("cuda", 1)]


def test_a_report_is_waited_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **rest: empty(*shape, **rest))
    with FakeTensorMode():
        HostCopy(empty(4, device="cuda:1"))
    assert recorded == ["the stream of cuda:1"]
