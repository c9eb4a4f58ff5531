"""The leader of a tensor-parallel group: rank 0's engine, whose calls the other ranks repeat, and the group's start.

Before each step rank 0 sends the other ranks the requests added, aborted and preempted since the last step. They make
the same calls, and step with rank 0. Adapters and weights come between two steps, on all ranks or on none; each rank
reads its own part. A step's decisions depend on the logits, which are bitwise equal on all ranks, and on no clock or
random state. Rank 0 also sends the decisions that its host makes within a step, because only rank 0 has the state and
the limits of a grammar. A fingerprint of rank 0's state goes with each step. A rank with another fingerprint is out of
step, and ends.
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
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel.follow import REFUSALS, Orders, Setup, fingerprint, run_follower
from mbd_core.engine.parallel.followers import Followers
from mbd_core.engine.parallel.group import Group, Rank, RankLost, init_group, num_arrived, open_store, sized_alike
from mbd_core.engine.parallel.shared_sums import GroupSums, SharedSums, load_shard
from mbd_core.engine.ranks import EngineCall
from mbd_core.engine.sequences.admission import AdmittedRequest
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantized_parts

if TYPE_CHECKING:
    from mbd_core.trace.recorder import TraceRecorder

ADDRESS = "127.0.0.1"  # all ranks are processes of one machine
START_SECONDS = 120.0  # for a process to start, import its libraries and find its device
LONGEST_STEP = 600.0  # seconds after which a step between GPUs counts as hanging: a first step compiles its kernels
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
        """Returns when all ranks have built their engines. `model` is rank 0's shard (`load_shard`), in FP8 or not.

        `followers` are the other ranks if they are child processes; `close()` ends them.
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
        self._lock = threading.Lock()  # held by a step or a sign of life: only one of them uses the group
        self._failure: str | None = None  # why no step can follow; never taken back
        self._step_deadline = math.inf  # time after which the running step counts as hanging
        self._closed = threading.Event()
        group.barrier()
        self._heartbeat = threading.Thread(target=self._beat, name="tensor-parallel heartbeat", daemon=True)
        self._heartbeat.start()

    @property
    def rank_sums(self) -> dict[str, Any]:
        """How the ranks sum: the method's `name`, and the reasons against the methods that were `not_chosen`."""
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
        """Makes a call on every rank: at once between two steps, or with the next step if the call `waits`."""
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
        """`Engine.step`, on all ranks at once. Raises `RankLost` if a rank is gone."""
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
                if self._failure is not None:  # set by the heartbeat: the step's results are void
                    raise RankLost(self._failure)
            except BaseException as error:
                loss, self._failure = self._failure, EARLIER_FAILED
                if isinstance(error, RuntimeError) and self.followers is not None:
                    reason = self.followers.failure()
                    if reason is not None:
                        error.add_note(reason)
                if loss is not None and not isinstance(error, RankLost):
                    raise RankLost(loss) from error  # an interrupted step's own error says less
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
        """Stops the followers, leaves the group with them, and kills followers that do not end. A second call does
        nothing.

        NCCL needs this order: every rank releases its graphs, all leave together, then rank 0 waits for the followers'
        processes. Lost followers are killed first, and rank 0 leaves without them. Rank 0 still releases its graphs,
        because NCCL's abort waits for graphs, but does not wait for the device, which may never finish.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._heartbeat.join(1.0)  # for a sign of life under way; an interruption lasts until the graphs are released
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
        """Leaves the group with all ranks, and returns whether all left. A rank that fails meanwhile counts as
        lost."""
        try:
            self._group.barrier()
            self._group.close()
        except RuntimeError:
            return False
        return True

    def _stop_followers(self) -> bool:
        """Orders the followers to stop, and returns whether they received the order. Lost followers, and followers
        within a step, cannot receive it."""
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
        """The heartbeat's thread. A running step is itself the sign of life. If a rank is lost during a step, rank 0
        may wait forever, as sums within a CUDA graph do, so this thread interrupts the step."""
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
        """Why the running step cannot end; `None` if it can."""
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
    """An engine over `size` processes of this machine; this process is rank 0, and on "cuda" rank r uses GPU r.

    The caller closes the engine. Raises `ValueError` for a size that does not divide the model or exceeds the GPUs,
    before any process starts, and for a rank that cannot load its part. Raises `RankLost` if a rank does not arrive in
    time. After an error no process runs.
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
            reason = None  # the other ranks lost this rank by its own error
        followers.end()
        if group is not None:
            group.abandon()
        if reason is not None:
            raise ValueError(f"the {size} tensor-parallel ranks could not start: {reason}") from error
        raise


def check_size(model: ModelConfig, size: int, *, device: str) -> None:
    """Raises `ValueError` if `size` ranks cannot hold `model` on this machine's devices."""
    if size < 1:
        raise ValueError(f"tensor_parallel={size} must be at least 1")
    model.sharded(size)
    if device == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel={size} needs a GPU for each rank; this process sees {torch.cuda.device_count()}"
        )


def _wait_for_followers(followers: Followers, store: dist.TCPStore, size: int) -> None:
    """Waits until all followers are about to join the group; raises `RankLost` if a follower ends or is late."""
    deadline = time.monotonic() + START_SECONDS
    while num_arrived(store) < size - 1:
        if not followers.alive or time.monotonic() > deadline:
            raise RankLost(f"not all of the {size} tensor-parallel ranks started within {START_SECONDS:g} s")
        time.sleep(0.02)
