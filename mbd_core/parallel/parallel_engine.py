"""Tensor parallelism: every rank runs the same engine on its shard, and only what rank 0 was asked to do crosses.

Rank 0 is a `ParallelEngine`, used like any other. Before each step it tells the others what was added, aborted and
preempted since the last one; they do the same (`follow`) and step with it. That is all that crosses: what a step
decides follows from the logits, which are the same on every rank bit for bit, and from nothing else, no clock and no
random state. With each step goes a fingerprint of rank 0's slots: a rank that has others is out of step and ends.
"""

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from mbd_core.checkpoint.loading import load_config
from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import Output, Request, StepOutput
from mbd_core.engine.engine import Engine, EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import Parts, quantize_weights, quantized_parts
from mbd_core.parallel.followers import Followers
from mbd_core.parallel.group import Group, Rank, RankLost, init_group, load_shard, num_arrived, open_store

if TYPE_CHECKING:
    from mbd_core.trace.recorder import TraceRecorder


_START = 120.0  # seconds in which a process must have started, imported its libraries and found its device


class OutOfStep(RuntimeError):
    """A follower's slots are not rank 0's: different hardware, libraries or weights, or a defect."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Rank 0's first message: what a follower builds its engine from, so that no two can be set up differently.

    model        rank 0's configuration
    fp8          which weights each rank rounds to FP8, of the part it holds
    num_threads  of the CPU, on which the rounding of a matrix product may depend
    """

    model: ModelConfig
    fp8: Parts | None
    engine: EngineConfig
    vocab_limit: int | None
    num_threads: int


@dataclass(frozen=True)
class Add:
    request: Request


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class Preempt:
    pass


@dataclass(frozen=True)
class Prepare:
    decoding: DecodingConfig


Command = Add | Abort | Preempt | Prepare


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Every later message: commands, what to do then, and the fingerprint there must be before a step. "idle" without
    commands is a sign of life."""

    then: Literal["step", "idle", "stop"]
    commands: tuple[Command, ...] = ()
    fingerprint: int = 0


class ParallelEngine(Engine):
    """Rank 0's engine. Its methods are `Engine`'s; `close()` lets the followers go and leaves the group.

    A thread sends a sign of life while there is no work, so that followers can tell silence from death. A step that
    fails leaves the ranks in different states: every later one raises `RankLost`.
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
    ) -> None:
        """`model` is rank 0's shard (`load_shard`), rounded to FP8 or not; returns when all ranks have built theirs.

        `followers` are the other ranks where they are child processes, and end with the engine.
        """
        rank = group.rank
        if rank.rank != 0:
            raise ValueError(f"rank {rank.rank} cannot lead: rank 0 does, the others call follow()")
        if model.shard != rank.shard:
            raise ValueError(f"the model is part {model.shard} and the rank is to hold {rank.shard}; use load_shard()")
        super().__init__(model, config, trace=trace, vocab_limit=vocab_limit)
        self.followers, self._group = followers, group
        self._commands: list[Command] = []
        self._lock = threading.Lock()
        self._failure: str | None = None  # why no step can follow; never taken back
        self._closed = threading.Event()
        group.tell(
            Welcome(
                model=model.config,
                fp8=quantized_parts(model),
                engine=config,
                vocab_limit=vocab_limit,
                num_threads=torch.get_num_threads(),
            )
        )
        group.meet()
        self._pulse = threading.Thread(target=self._beat, name="tensor-parallel pulse", daemon=True)
        self._pulse.start()

    def add(self, request: Request) -> None:
        super().add(request)
        self._commands.append(Add(request))

    def abort(self, request_id: str) -> Output | None:
        output = super().abort(request_id)
        if output is not None:
            self._commands.append(Abort(request_id))
        return output

    def preempt(self) -> str | None:
        self._commands.append(Preempt())  # also where nobody runs: it collects the step under way
        return super().preempt()

    def step(self) -> list[StepOutput]:
        """`Engine.step`, on all ranks at once. Raises `RankLost` where one of them is gone."""
        if not self.has_work:
            return []
        with self._together(Orders(then="step", commands=tuple(self._commands), fingerprint=fingerprint(self))):
            return super().step()

    def prepare(self, decoding: DecodingConfig) -> int:
        self._check_idle("prepare")  # what is refused is refused before the others are told
        with self._together(Orders(then="idle", commands=(*self._commands, Prepare(decoding)))):
            return super().prepare(decoding)

    @contextmanager
    def _together(self, orders: Orders) -> Iterator[None]:
        """What the body does, the followers do too; where that fails the ranks are in different states for good."""
        with self._lock:
            if self._failure is not None:
                raise RankLost(self._failure)
            try:
                self._group.tell(orders)
                self._commands.clear()
                yield
            except BaseException as error:
                self._failure = "an earlier step of the tensor-parallel group failed; start the group anew"
                if isinstance(error, RankLost) and self.followers is not None:
                    reason = self.followers.failure()
                    if reason is not None:
                        error.add_note(reason)
                raise

    def check_health(self) -> None:
        """Raises `RankLost` where the group is of no use any more: a step failed, a sign of life was not taken, or a
        follower's process has ended. Never waits, and may be called from any thread."""
        if self._failure is not None:
            raise RankLost(self._failure)
        if self.followers is not None and not self.followers.alive:
            raise RankLost("a tensor-parallel follower's process has ended; start the group anew")

    def close(self) -> None:
        """Let the followers go, and end those that do not; does nothing the second time."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._pulse.join()
        wait = 0.0
        # where the lock is taken the followers are amid a step: they are ended
        if self._failure is None and self._lock.acquire(blocking=False):
            try:
                self._group.tell(Orders(then="stop"))
                wait = self._group.rank.timeout
            except RankLost:
                pass
            finally:
                self._lock.release()
        self._failure = self._failure or "the engine was closed"
        if self.followers is not None:
            self.followers.end(wait)
        self._group.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._group.rank.timeout / 4):
            with self._lock:
                if self._failure is not None:
                    return
                try:
                    self._group.tell(Orders(then="idle"))
                except RankLost as error:
                    self._failure = str(error)


def follow(model: Decoder, group: Group) -> None:
    """Do what rank 0 does until it says stop; `model` is this rank's shard.

    Raises `ValueError` if it is part of another model, `RankLost` if rank 0 is gone, `OutOfStep` if the two have come
    to different states; the process should then end, which the other ranks notice.
    """
    welcome: Welcome = group.hear()
    if welcome.model != model.config:
        raise ValueError(f"rank {group.rank.rank} has loaded another model: {model.config}, rank 0 {welcome.model}")
    if welcome.fp8 is not None:
        quantize_weights(model, welcome.fp8)
    if group.rank.kind == "cpu":
        torch.set_num_threads(welcome.num_threads)
    engine = Engine(model, welcome.engine, vocab_limit=welcome.vocab_limit)
    group.meet()
    while (orders := group.hear()).then != "stop":
        for command in orders.commands:
            match command:
                case Add(request):
                    engine.add(request)
                case Abort(request_id):
                    engine.abort(request_id)
                case Preempt():
                    engine.preempt()
                case Prepare(decoding):
                    engine.prepare(decoding)
        if orders.then == "idle":
            continue
        if fingerprint(engine) != orders.fingerprint:
            raise OutOfStep(f"rank {group.rank.rank} is not in rank 0's state; are devices and libraries the same?")
        engine.step()


def fingerprint(engine: Engine) -> int:
    """A checksum of what the engine's running requests have come to, as the host knows it: the last report that was
    read, and what was given out. It waits for no step that is under way."""
    running = engine.scheduler.running.items()
    given = [(row, s.request.request_id, s.prefilled, len(s.emitted), s.emitted[-4:]) for row, s in running]
    return zlib.crc32(repr(given).encode(), zlib.crc32(engine.last_report_X.tobytes()))


def run_follower(folder: Path, rank: Rank, dtype: torch.dtype | None = None) -> None:
    """A follower's whole life, in a process of its own: join, load the shard, follow, leave.

    One that fails does not leave: the others learn of it from the end of its process, when it has said why.
    """
    group = init_group(rank)
    follow(load_shard(folder, group, dtype=dtype), group)
    group.close()


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
) -> ParallelEngine:
    """An engine over `size` processes of this machine, rank 0 being this one; rank r uses GPU r where device is cuda.

    Whoever calls this closes the engine. Raises `ValueError`, before anything is started, for a size that does not
    divide the model or exceeds the GPUs, and for a rank that cannot load its part; `RankLost` if one does not come in
    time. Nothing is left running then.
    """
    check_size(load_config(folder), size, device=device)
    store = open_store("127.0.0.1", size=size, timeout=timeout)
    ranks = [
        Rank(
            rank=rank,
            size=size,
            address="127.0.0.1",
            port=store.port,
            device=f"cuda:{rank}" if device == "cuda" else device,
            timeout=timeout,
        )
        for rank in range(size)
    ]
    followers = Followers(run_follower, [(folder, rank, dtype) for rank in ranks[1:]])
    group: Group | None = None
    try:
        deadline = time.monotonic() + _START
        while num_arrived(store) < size - 1:
            if not followers.alive or time.monotonic() > deadline:
                raise RankLost(f"not all of the {size} tensor-parallel ranks started within {_START:g} s")
            time.sleep(0.02)
        group = init_group(ranks[0], store=store)
        model = load_shard(folder, group, dtype=dtype)
        if fp8 is not None:
            quantize_weights(model, fp8)
        return ParallelEngine(model, config, group=group, followers=followers, trace=trace, vocab_limit=vocab_limit)
    except BaseException as error:
        failure = followers.failure() if isinstance(error, RankLost) else None
        followers.end()
        if group is not None:
            group.close()
        if failure is not None:
            raise ValueError(f"the {size} tensor-parallel ranks could not start: {failure}") from error
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
