"""How the ranks start: refusals before any process starts, and one sentence when a rank cannot."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_groups import DENSE, LIMIT, SIZES, break_off, gone

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.engine.parallel import leader
from mbd_core.engine.parallel.followers import Followers
from mbd_core.engine.parallel.group import Rank, init_group
from mbd_core.engine.parallel.leader import check_size, start_parallel
from mbd_core.engine.parallel.shared_sums import load_shard
from mbd_core.models.model_config import Fp8Parts


def test_what_does_not_divide_is_named_before_anything_starts(folders: dict[str, Path]) -> None:
    for size, sentence in (
        (3, "num_key_value_heads=4 does not divide among 3 tensor-parallel ranks"),
        (0, "tensor_parallel=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            start_parallel(folders["dense"], SIZES, size=size)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_size(DENSE, 1, device="cuda")
    check_size(DENSE, 2, device="cpu")
    with pytest.raises(ValueError, match="tensor_parallel=2 needs a GPU"):
        check_size(DENSE, 2, device="cuda")


def unloadable(folders: dict[str, Path], folder: Path) -> Path:
    """A model of which rank 1's half is not finite, and rank 0's is."""
    model = load_model(folders["dense"])
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[-1, 0] = torch.inf
    save_model(folder, model)
    return folder


def run_out_of_memory(folder: Path, rank: Rank, dtype: torch.dtype | None, fp8: Fp8Parts | None) -> None:
    group = init_group(rank)
    load_shard(folder, group, dtype=dtype)
    group.receive()
    raise MemoryError("no room for pages")


@pytest.mark.usefixtures("warm_followers")
@pytest.mark.parametrize("when", ["before it joins", "loading", "building its engine"])
def test_a_rank_that_cannot_start_is_one_sentence_at_once_and_leaves_nobody(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    started: list[Followers] = []

    def recorded(*args: Any) -> Followers:
        started.append(Followers(*args))
        return started[0]

    monkeypatch.setattr(leader, "Followers", recorded)
    if when == "loading":
        folder, sentence = unloadable(folders, tmp_path / "bad"), "rank 1: ValueError: .*q_proj.* not finite"
    elif when == "before it joins":
        monkeypatch.setattr(leader, "run_follower", break_off)
        folder, sentence = folders["dense"], "rank 1: OSError: no such device$"
    else:
        monkeypatch.setattr(leader, "run_follower", run_out_of_memory)
        folder, sentence = folders["dense"], "rank 1: MemoryError: no room for pages$"
    begun = time.monotonic()
    with pytest.raises(ValueError, match=f"^the 2 tensor-parallel ranks could not start: {sentence}"):
        start_parallel(folder, SIZES, size=2, timeout=10 * LIMIT)
    assert time.monotonic() - begun < LIMIT, "it waited for the rank that had failed"
    assert not dist.is_initialized()
    (followers,) = started
    assert all(gone(pid) for pid in followers.pids)
