"""The threads that OpenMP keeps for a thread that computed."""

import sys
from pathlib import Path

import pytest
import torch

from mbd_core.ops.machine import end_team


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in Linux's /proc")
def test_a_team_ends_and_comes_back_with_the_next_operation() -> None:
    def threads_after_a_product() -> int:
        torch.ones(512, 512) @ torch.ones(512, 512)
        torch.ones(1 << 20).exp()  # OpenMP's own loop
        return len(list(Path("/proc/self/task").iterdir()))

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with_team = threads_after_a_product()
        end_team()
        assert len(list(Path("/proc/self/task").iterdir())) < with_team
        assert threads_after_a_product() == with_team
    finally:
        torch.set_num_threads(threads)
