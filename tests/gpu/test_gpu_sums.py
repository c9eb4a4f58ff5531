"""Sums in shared memory on a real GPU, which two processes share: torch lets ranks overlap on a device for tests."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_groups import rank_of
from torch import multiprocessing

from mbd_core.engine.parallel import shared_sums
from mbd_core.engine.parallel.group import init_group
from mbd_core.engine.parallel.shared_sums import SharedSums, share_sums
from mbd_core.ops.layer.residual_norm import add_norm

pytestmark = pytest.mark.gpu
SIZE, TOKENS, WIDTH, LAYERS = 2, 128, 2048, 8


def work(rank: int, port: int) -> None:
    """In every rank, a process that changes torch for itself alone: the sums of many layers, eagerly and as a replayed
    graph, are those of the parts."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    shared_sums._check_nvlink = lambda size: None  # one GPU reaches itself
    init_process_group = dist.init_process_group

    def over_gloo(backend: str, **options: Any) -> None:
        init_process_group("gloo", **{**options, "device_id": None})  # NCCL refuses two ranks on a device

    dist.init_process_group = over_gloo
    group = init_group(rank_of(rank, SIZE, port, timeout=60.0, device="cuda:0"))
    try:
        check(share_sums(group), rank)
        group.barrier()
    finally:
        group.close()


def check(sums: SharedSums, rank: int) -> None:
    generator = torch.Generator("cuda").manual_seed(7)
    parts = torch.randn(LAYERS, 2, SIZE, TOKENS, WIDTH, generator=generator, device="cuda").bfloat16()
    gain = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    start = torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    mine = parts[:, :, rank].contiguous()

    def run() -> torch.Tensor:
        x = start
        for layer in range(LAYERS):
            for number in (0, 1):
                place = sums.place(number, x)
                assert place is not None
                place.copy_(mine[layer, number])
                x, _ = add_norm(x, gain, 1e-6, ranks=sums.share(number))
        return x

    wanted = start
    for layer in range(LAYERS):
        for number in (0, 1):
            wanted = (wanted.float() + parts[layer, number, 0].float() + parts[layer, number, 1].float()).bfloat16()
    for _ in range(3):
        torch.testing.assert_close(run(), wanted, rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    eager = run()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, eager)


def test_two_processes_sum_what_each_wrote() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (port,), nprocs=SIZE)  # raises what a process raised
