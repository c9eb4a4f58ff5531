"""A follower: the engine of rank 1, 2, ..., which repeats what rank 0's engine does."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mbd_core.engine.engine import Engine
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.engine.steering import Decided
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Parts
from mbd_core.models.quantize import quantized_parts
from mbd_core.parallel.group import Group, Rank, init_group
from mbd_core.parallel.kv_agreement import sized_alike
from mbd_core.parallel.orders import (
    Abort,
    Add,
    Command,
    ForgetPrefixes,
    LoadAdapter,
    Preempt,
    Prepare,
    Setup,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
    change,
    fingerprint,
)
from mbd_core.parallel.shared_sums import load_shard


class FollowingEngine(Engine):
    """The engine of a rank that follows: what the host decides within a step comes from rank 0."""

    def __init__(self, model: Decoder, config: EngineConfig, *, group: Group, vocab_limit: int | None) -> None:
        super().__init__(model, config, vocab_limit=vocab_limit)
        self._group = group

    def share(self, decide: Callable[[], list[Decided]]) -> list[Decided]:
        decided: list[Decided] = self._group.receive()
        return decided


class OutOfStep(RuntimeError):
    """A follower's state is not rank 0's: hardware, libraries or weights differ, or the engine has a defect."""


def follow(model: Decoder, group: Group) -> None:
    """Do what rank 0 does until it says stop; `model` is this rank's shard. The group is to be left then, at once.

    Raises `ValueError` if the shard is part of another model, `RankLost` if rank 0 is gone, and `OutOfStep` if the
    states of the two differ. The process should then end, which the other ranks notice.
    """
    engine = _build(model, group)
    group.barrier()
    while (orders := group.receive()).action != "stop":
        for command in orders.commands:
            _obey(engine, command, group)
        if orders.action == "wait":
            continue
        if fingerprint(engine) != orders.fingerprint:
            raise OutOfStep(f"rank {group.rank.rank} is not in rank 0's state; are devices and libraries the same?")
        engine.step()
    engine.close()
    group.barrier()


def _build(model: Decoder, group: Group) -> Engine:
    """This rank's engine, set up as rank 0's."""
    setup: Setup = group.receive()
    if setup.model != model.config:
        raise ValueError(f"rank {group.rank.rank} has loaded another model: {model.config}, rank 0 {setup.model}")
    if setup.fp8 != quantized_parts(model):
        raise ValueError(f"rank {group.rank.rank} has FP8 weights ({quantized_parts(model)}), rank 0 ({setup.fp8})")
    if group.rank.kind == "cpu":
        torch.set_num_threads(setup.num_threads)
    sized = sized_alike(model, setup.engine, group)
    return FollowingEngine(model, sized, group=group, vocab_limit=setup.vocab_limit)


def _obey(engine: Engine, command: Command, group: Group) -> None:
    match command:
        case Add(admitted):
            engine.add_admitted(admitted)
        case Abort(request_id):
            engine.abort(request_id)
        case Preempt():
            engine.preempt()
        case Prepare(decoding):
            engine.prepare(decoding)
        case ForgetPrefixes():
            engine.forget_prefixes()
        case UnloadAdapter(name):
            engine.unload_adapter(name)
        case Sleep():
            group.total(engine.sleep())
        case LoadAdapter() | UpdateWeights() | WakeUp():
            with suppress(ValueError):  # rank 0 raises it too
                change(engine, command, group)


def run_follower(folder: Path, rank: Rank, dtype: torch.dtype | None = None, fp8: Parts | None = None) -> None:
    """A follower's whole life, in a process of its own: join, load the shard, follow, leave.

    If it fails it does not leave the group: its process ends, and the other ranks learn the reason from that.
    """
    group = init_group(rank)
    follow(load_shard(folder, group, dtype=dtype, fp8=fp8), group)
    group.close()
