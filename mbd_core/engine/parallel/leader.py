"""The leader of a tensor-parallel group: rank 0's engine, which the other ranks repeat, and how all of them start.

Before each step rank 0 sends the others the requests that were added, aborted and preempted since the last one; they
do the same and step with it. Adapters and weights, of which each rank reads its own part, come between two steps, on
all ranks or on none. What a step decides follows from the logits, which are the same on every rank bit for bit, and
from no clock and no random state; so nothing else crosses but what the host decides within a step, under grammars for
example, whose state and limits rank 0 alone has. A fingerprint of rank 0's state goes with each step; a
rank whose own differs is out of step, and ends.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mbd_core.checkpoint.block_experts import check_blocks
from mbd_core.checkpoint.config import load_config
from mbd_core.decoding.blocks.request import StepOutput
from mbd_core.decoding.grammar.guide import Grammars, GuideState
from mbd_core.engine.admission import AdmittedRequest
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel.follow import REFUSALS, Orders, Setup, fingerprint, run_follower
from mbd_core.engine.parallel.followers import Followers
from mbd_core.engine.parallel.group import Group, Rank, RankLost, init_group, num_arrived, open_store, sized_alike
from mbd_core.engine.parallel.shared_sums import GroupSums, SharedSums, load_shard
from mbd_core.engine.ranks import EngineCall
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantized_parts

if TYPE_CHECKING:
    from mbd_core.trace.recorder import TraceRecorder

ADDRESS = "127.0.0.1"  # all ranks are processes of one machine
START_SECONDS = 120.0  # for a process to start, import its libraries and find its device
LONGEST_STEP = 600.0  # seconds between GPUs, from which on a step counts as hanging: a first one compiles its kernels
EARLIER_FAILED = "an earlier step of the tensor-parallel group failed; start the group anew"
FOLLOWER_ENDED = "a tensor-parallel follower's process has ended; start the group anew"


class ParallelEngine(Engine):
    """Rank 0's engine. Its methods are `Engine`'s; `close()` releases the followers and leaves the group.

    While there is no work a thread sends signs of life, so that a follower can tell an idle leader from a dead one.
    After a step that failed the ranks are in different states: every later step raises `RankLost`.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        group: Group,
        followers: Followers | None = None,
        trace: "TraceRecorder | None" = None,
        vocab_limit: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`model` is rank 0's shard (`load_shard`), rounded to FP8 or not; returns when all ranks have built theirs.

        `followers` are the other ranks where they are child processes; `close()` ends them.
        """
        rank = group.rank
        if rank.rank != 0:
            raise ValueError(f"rank {rank.rank} cannot lead: rank 0 does, the others call follow()")
        if model.shard != rank.shard:
            raise ValueError(f"the model is part {model.shard} and the rank is to hold {rank.shard}; use load_shard()")
        group.broadcast(
            Setup(
                model=model.config,
                fp8=quantized_parts(model),
                engine=config,
                vocab_limit=vocab_limit,
                num_threads=torch.get_num_threads(),
            )
        )
        sized_config = sized_alike(model, config, group)
        super().__init__(model, sized_config, trace=trace, vocab_limit=vocab_limit, grammars=grammars, ranks=group)
        self.followers, self._group = followers, group
        self._calls: list[EngineCall] = []
        self._lock = threading.Lock()  # of the group: a step and the signs of life exclude each other
        self._failure: str | None = None  # why no step can follow; never taken back
        self._step_deadline = math.inf  # from when on the step under way counts as hanging
        self._closed = threading.Event()
        group.barrier()
        self._heartbeat = threading.Thread(target=self._beat, name="tensor-parallel heartbeat", daemon=True)
        self._heartbeat.start()

    @property
    def rank_sums(self) -> dict[str, Any]:
        """How the ranks add up: the `name` of it, and why another way was `not_chosen`."""
        reduce = self.model.reduce
        assert isinstance(reduce, SharedSums | GroupSums), "the model was loaded by load_shard"
        if isinstance(reduce, SharedSums) and (self.config.batch_invariant or not self.runner.has_kernel_layers):
            reduce = GroupSums(self._group, "no layer runs by kernels: all are FP8, or rows are computed apart")
        return reduce.description()

    def add_admitted(self, admitted_request: AdmittedRequest) -> None:
        super().add_admitted(admitted_request)
        sequence = self.scheduler.find(admitted_request.request.request_id)
        guide = None if sequence is None else sequence.guide
        state = None if guide is None else GuideState(list(guide.pending), guide.ended)
        shared_request = replace(admitted_request, guide=state)  # a compiled grammar stays on rank 0
        self._calls.append(EngineCall(method="add_admitted", named={"admitted_request": shared_request}, waits=True))

    def order(self, call: EngineCall) -> Any:
        """Make a call on every rank: at once between two steps, or with the next step if it `waits`."""
        if call.waits:
            result = call.apply(self)
            self._calls.append(call)
            return result
        with self._on_all_ranks(Orders(action="wait", calls=(*self._calls, call.sent()))):
            try:
                return call.apply(self)
            except REFUSALS as error:
                refusal = error
        raise refusal

    def step(self) -> list[StepOutput]:
        """`Engine.step`, on all ranks at once. Raises `RankLost` where one of them is gone."""
        if not self.has_work:
            return []
        orders = Orders(
            action="step",
            calls=tuple(self._calls),
            fingerprint=fingerprint(self),
            pace=self.pacer.pace(),
            drafts=self.drafts(),
        )
        with self._on_all_ranks(orders):
            return super().step()

    @contextmanager
    def _on_all_ranks(self, orders: Orders) -> Iterator[None]:
        """The followers carry out `orders` while the body runs here; if either fails, no later call succeeds."""
        with self._lock:
            if self._failure is not None:
                raise RankLost(self._failure)
            try:
                if orders.action == "step" and self._group.rank.kind == "cuda":
                    self._step_deadline = time.monotonic() + LONGEST_STEP
                self._group.broadcast(orders)
                self._calls.clear()
                yield
                if self._failure is not None:  # the heartbeat's: what was computed since is of no use
                    raise RankLost(self._failure)
            except BaseException as error:
                loss, self._failure = self._failure, EARLIER_FAILED
                if isinstance(error, RuntimeError) and self.followers is not None:
                    reason = self.followers.failure()
                    if reason is not None:
                        error.add_note(reason)
                if loss is not None and not isinstance(error, RankLost):
                    raise RankLost(loss) from error  # what an interrupted step fails with says less
                raise
            finally:
                self._step_deadline = math.inf

    def check_health(self) -> None:
        """Raise `RankLost` if a step or a sign of life failed, or if a follower's process has ended.

        Never waits, and may be called from any thread.
        """
        if self._failure is not None:
            raise RankLost(self._failure)
        if self.followers is not None and not self.followers.alive:
            raise RankLost(FOLLOWER_ENDED)

    def close(self) -> None:
        """Stop the followers, leave the group with them, and kill those that do not end; the second call does nothing.

        The order is that of NCCL: every rank lets go of its graphs, all leave together, and only then does rank 0 wait
        for the followers' processes. Lost followers are killed first, and rank 0 leaves alone: it lets go of its
        graphs, too, because NCCL's abort waits for them, but not for a device that may never finish.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._heartbeat.join(1.0)  # a sign of life under way; an interruption lasts until the graphs are gone
        is_orderly = self._stop_followers()
        self._failure = self._failure or "the engine was closed"
        self._graphs.release(wait=is_orderly)
        self._heartbeat.join()
        if is_orderly:
            is_orderly = self._leave_together()
        if self.followers is not None:
            self.followers.end(self._group.rank.timeout if is_orderly else 0.0)
        if not is_orderly:
            self._group.abandon()

    def _leave_together(self) -> bool:
        """Whether all ranks left the group; one that fails on its way out counts as lost."""
        try:
            self._group.barrier()
            self._group.close()
        except RuntimeError:
            return False
        return True

    def _stop_followers(self) -> bool:
        """Order them to stop; whether they received it. Followers within a step, or lost ones, cannot."""
        if self._failure is not None or not self._lock.acquire(blocking=False):
            return False
        try:
            self._group.broadcast(Orders(action="stop"))
        except RankLost:
            return False
        finally:
            self._lock.release()
        return True

    def _beat(self) -> None:
        """The heartbeat's thread. While rank 0 is within a step, that is the sign of life. If a rank is lost then,
        rank 0 may wait for ever, as sums within a CUDA graph do, and must be interrupted."""
        while not self._closed.wait(self._group.rank.timeout / 4):
            if not self._lock.acquire(blocking=False):
                if (loss := self._loss()) is not None:
                    self._failure = loss
                    self._group.interrupt()
                    return
                continue
            try:
                if self._failure is not None or self._closed.is_set():
                    return
                self._group.broadcast(Orders(action="wait"))
            except RankLost as error:
                self._failure = str(error)
            finally:
                self._lock.release()

    def _loss(self) -> str | None:
        """Why the step under way cannot come to its end."""
        if self.followers is not None and not self.followers.alive:
            return FOLLOWER_ENDED
        if time.monotonic() > self._step_deadline:
            return f"a step took longer than {LONGEST_STEP:g} s: a rank hangs; start the group anew"
        return None


# The start of a group: this process becomes rank 0, the other ranks are its child processes.


def start_parallel(
    folder: Path,
    config: EngineConfig,
    *,
    size: int,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    fp8: Fp8Parts | None = None,
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
