"""Start a tensor-parallel engine: this process becomes rank 0, the other ranks are its child processes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.loading import check_blocks
from mbd_core.decoding.grammar.guide import Grammars
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.parallel.followers import Followers, run_follower
from mbd_core.engine.parallel.group import Group, Rank, RankLost, init_group, num_arrived, open_store
from mbd_core.engine.parallel.leader import ParallelEngine
from mbd_core.engine.parallel.shared_sums import load_shard
from mbd_core.models.model_config import ModelConfig, Parts

if TYPE_CHECKING:
    from mbd_core.trace.recorder import TraceRecorder

ADDRESS = "127.0.0.1"  # all ranks are processes of one machine
START_SECONDS = 120.0  # for a process to start, import its libraries and find its device


def start_parallel(
    folder: Path,
    config: EngineConfig,
    *,
    size: int,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    fp8: Parts | None = None,
    timeout: float = 120.0,
    trace: "TraceRecorder | None" = None,
    vocab_limit: int | None = None,
    grammars: Grammars | None = None,
) -> ParallelEngine:
    """An engine over `size` processes of this machine, rank 0 being this one; rank r uses GPU r where device is cuda.

    The caller closes the engine. Raises `ValueError`, before anything is started, for a size that does not divide the
    model or exceeds the GPUs, and for a rank that cannot load its part; `RankLost` if a rank does not arrive in time.
    No process is left running then.
    """
    check_size(load_config(folder), size, device=device)
    if fp8 == "blocks":
        check_blocks(folder, num_ranks=size)
    store = open_store(ADDRESS, size=size, timeout=timeout)
    ranks = [
        Rank(
            rank=rank,
            size=size,
            address=ADDRESS,
            port=store.port,
            device=f"cuda:{rank}" if device == "cuda" else device,
            timeout=timeout,
        )
        for rank in range(size)
    ]
    followers = Followers(run_follower, [(folder, rank, dtype, fp8) for rank in ranks[1:]])
    group: Group | None = None
    try:
        _wait_for_followers(followers, store, size)
        group = init_group(ranks[0], store=store)
        model = load_shard(folder, group, dtype=dtype, fp8=fp8)
        return ParallelEngine(
            model, config, group=group, followers=followers, trace=trace, vocab_limit=vocab_limit, grammars=grammars
        )
    except BaseException as error:
        reason = followers.failure() if isinstance(error, RuntimeError) else None
        if not isinstance(error, RankLost) and "RankLost" in (reason or ""):
            reason = None  # this rank's own error is what the others lost it by
        followers.end()
        if group is not None:
            group.abandon()
        if reason is not None:
            raise ValueError(f"the {size} tensor-parallel ranks could not start: {reason}") from error
        raise


def check_size(model: ModelConfig, size: int, *, device: str) -> None:
    """Raise `ValueError` for a number of ranks that cannot hold `model` on this machine's devices."""
    if size < 1:
        raise ValueError(f"tensor_parallel={size} must be at least 1")
    model.sharded(size)
    if device == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel={size} needs a GPU for each rank; this process sees {torch.cuda.device_count()}"
        )


def _wait_for_followers(followers: Followers, store: dist.TCPStore, size: int) -> None:
    """Until all are about to join the group; `RankLost` if one ends before, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while num_arrived(store) < size - 1:
        if not followers.alive or time.monotonic() > deadline:
            raise RankLost(f"not all of the {size} tensor-parallel ranks started within {START_SECONDS:g} s")
        time.sleep(0.02)
