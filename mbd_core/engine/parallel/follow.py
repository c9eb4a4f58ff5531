"""A follower: the engine of rank 1, 2, ... repeats rank 0's engine by its messages: one `Setup`, then `Orders`."""

import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.dormant import NotEnoughMemory
from mbd_core.engine.parallel.group import Group, Rank, init_group, sized_alike
from mbd_core.engine.parallel.shared_sums import load_shard
from mbd_core.engine.ranks import EngineCall
from mbd_core.engine.schedule.pacing import Pace
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantized_parts


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message: a follower builds its engine from it, so that all ranks are set up alike.

    model        rank 0's configuration
    fp8          which weights of rank 0's part are FP8
    num_threads  threads of the CPU; the rounding of a matrix product may depend on their number
    """

    model: ModelConfig
    fp8: Fp8Parts | None
    engine: EngineConfig
    vocab_limit: int | None
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Every later message.

    calls        calls to rank 0's engine since the last message, in their order
    action       the action after the calls: one step, nothing ("wait"), or the end. "wait" without calls is a sign of
                 life
    fingerprint  fingerprint of rank 0's engine before the step; a follower's own must be equal
    pace         pace of the step's prompt chunks, by rank 0's measures
    drafts       whether requests that may draft do so, by rank 0's measures
    """

    action: Literal["step", "wait", "stop"]
    calls: tuple[EngineCall, ...] = ()
    fingerprint: int = 0
    pace: Pace | None = None
    drafts: bool = True


REFUSALS = (
    ValueError,
    NotEnoughMemory,
)  # a call between two steps raises these on all ranks alike, and changes nothing


def fingerprint(engine: Engine) -> int:
    """A checksum of the state of the running requests, as far as the host knows it.

    It covers the last report that was read, the tokens that were emitted and the number of weight swaps; it waits for
    no step that is under way.
    """
    rows = engine.scheduler.running.items()
    states = [(row, s.request.request_id, s.prefilled, s.num_emitted, s.answer.tokens[-4:]) for row, s in rows]
    last_report = zlib.crc32(engine.last_report.packed_X.tobytes())
    return zlib.crc32(repr((engine.weights_version, states)).encode(), last_report)


class OutOfStep(RuntimeError):
    """A follower's state is not rank 0's: hardware, libraries or weights differ, or the engine has a defect."""


def follow(model: Decoder, group: Group) -> None:
    """Repeats rank 0's calls and steps until its stop message; `model` is this rank's shard. The caller then leaves
    the group at once.

    Raises `ValueError` if the shard is part of another model, `RankLost` if rank 0 is gone, and `OutOfStep` if the
    states of the two differ. The process should then end, which the other ranks notice.
    """
    engine = _build(model, group)
    group.barrier()
    while (orders := group.receive()).action != "stop":
        for call in orders.calls:
            with suppress(*(() if call.waits else REFUSALS)):  # rank 0 raises them too
                call.apply(engine)
        if orders.action == "wait":
            continue
        if fingerprint(engine) != orders.fingerprint:
            raise OutOfStep(f"rank {group.rank.rank} is not in rank 0's state; are devices and libraries the same?")
        engine.pacer.follow(orders.pace)
        if engine.drafting is not None:
            engine.drafting.follow(orders.drafts)
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
    config = sized_alike(model, setup.engine, group)
    return Engine(model, config, vocab_limit=setup.vocab_limit, ranks=group)


def run_follower(folder: Path, rank: Rank, dtype: torch.dtype | None = None, fp8: Fp8Parts | None = None) -> None:
    """A follower's whole life, in a process of its own: join, load the shard, follow, leave.

    A follower that fails does not leave the group: its process ends, and the other ranks learn the reason from its
    end.
    """
    group = init_group(rank)
    follow(load_shard(folder, group, dtype=dtype, fp8=fp8), group)
    group.close()
