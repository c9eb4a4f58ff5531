"""The process group: shards compute what the whole model computes, with the same bits on every rank."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_groups import CONFIGS, LIMIT, SIZES, VOCAB, rank_of, requests
from torch import multiprocessing

from mbd_core.checkpoint.loading import load_model
from mbd_core.engine.parallel.group import RankLost, init_group, open_store
from mbd_core.engine.parallel.leader import start_parallel
from mbd_core.engine.parallel.shared_sums import load_shard
from mbd_core.models.decoder import Decoder
from mbd_core.ops.attention.whole import DenseAttention


def logits(model: Decoder) -> torch.Tensor:
    device = model.model.norm.weight.device
    tokens = torch.randint(2, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    sees = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=device)
    positions = torch.arange(40, device=device).expand(2, -1)
    with torch.inference_mode():
        return model.logits(model(tokens, positions, DenseAttention(sees)))


def check_logits(index: int, folders: dict[str, Path], size: int, port: int) -> None:
    """In every rank: shards' logits are near the whole model's and the same bits everywhere."""
    torch.set_num_threads(1)
    group = init_group(rank_of(index + 1, size, port))
    try:
        compare_logits(folders, size, load_shard, group)
    finally:
        group.close()


def compare_logits(folders: dict[str, Path], size: int, load: Any, group: Any) -> None:
    for folder in folders.values():
        found = logits(load(folder, group))
        torch.testing.assert_close(found, logits(load_model(folder)), atol=1e-4, rtol=1e-4)
        everywhere = [torch.empty_like(found) for _ in range(size)]
        dist.all_gather(everywhere, found.contiguous())
        assert all(torch.equal(found, other) for other in everywhere)


@pytest.mark.parametrize(("size", "names"), [(2, tuple(CONFIGS)), (4, ("llada2-moe",))])
def test_logits_are_near_the_whole_models_and_the_same_bits_on_every_rank(
    folders: dict[str, Path], size: int, names: tuple[str, ...]
) -> None:
    folders = {name: folders[name] for name in names}
    store = open_store("127.0.0.1", size=size, timeout=20)
    others = multiprocessing.start_processes(
        check_logits,
        (folders, size, store.port),
        nprocs=size - 1,
        join=False,
        daemon=True,
        start_method="forkserver",  # as warm as `WarmPython`
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    group = init_group(rank_of(0, size, store.port), store=store)
    try:
        compare_logits(folders, size, load_shard, group)
        while not others.join():
            pass
    finally:
        group.close()
        torch.set_num_threads(threads)


def test_places_are_checked(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        init_group(rank_of(2, 2, 0))
    with pytest.raises(ValueError, match="device='meta'"):
        rank_of(0, 2, 0, device="meta")
    with pytest.raises(ValueError, match="timeout=0"):
        rank_of(0, 2, 0, timeout=0)


@pytest.mark.usefixtures("warm_followers")
def test_a_missing_rank_is_an_error_and_the_process_can_start_another_group(folders: dict[str, Path]) -> None:
    store = open_store("127.0.0.1", size=2, timeout=1)
    with pytest.raises(RankLost, match=r"within 1 s: 1 arrived"):
        init_group(rank_of(0, 2, store.port, timeout=1), store=store)
    assert not dist.is_initialized()
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=LIMIT)) as engine:
        assert engine.generate(requests(1))
