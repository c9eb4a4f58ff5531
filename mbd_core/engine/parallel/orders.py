"""The messages of rank 0 to the other ranks: one `Setup`, then `Orders` before each step."""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.admission import Admitted
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel.group import Group
from mbd_core.engine.weights import SwapMode
from mbd_core.models.model_config import ModelConfig, Parts


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message: what a follower builds its engine from, so that all ranks are set up alike.

    model        rank 0's configuration
    fp8          which weights of the part it holds are FP8
    num_threads  of the CPU, on which the rounding of a matrix product may depend
    """

    model: ModelConfig
    fp8: Parts | None
    engine: EngineConfig
    vocab_limit: int | None
    num_threads: int


@dataclass(frozen=True)
class Add:
    admitted: Admitted


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class Preempt:
    pass


@dataclass(frozen=True)
class Prepare:
    decoding: DecodingConfig


@dataclass(frozen=True)
class ForgetPrefixes:
    pass


@dataclass(frozen=True)
class LoadAdapter:
    name: str
    folder: Path


@dataclass(frozen=True)
class UnloadAdapter:
    name: str


@dataclass(frozen=True)
class UpdateWeights:
    folder: Path
    mode: SwapMode
    version: int | None


@dataclass(frozen=True)
class Sleep:
    pass


@dataclass(frozen=True)
class WakeUp:
    pass


Change = LoadAdapter | UpdateWeights | WakeUp
Command = Add | Abort | Preempt | Prepare | ForgetPrefixes | UnloadAdapter | Sleep | Change


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Every later message.

    commands     the calls that rank 0's engine received since the last message, in their order
    action       what follows them: one step, nothing ("wait"), or the end. "wait" without commands is a sign of life
    fingerprint  of rank 0's engine before the step; a follower's own must be equal
    """

    action: Literal["step", "wait", "stop"]
    commands: tuple[Command, ...] = ()
    fingerprint: int = 0


def change(engine: Engine, command: Change, group: Group) -> None:
    """What may fail on one rank alone, as each reads its own part of a file or takes memory of its own device: all
    raise `ValueError` then, and none has changed. `engine` is this rank's, of which only `Engine`'s part is meant."""
    match command:
        case LoadAdapter(name, folder):
            engine.adapters.place(name, group.agree(lambda: engine.adapters.read(name, folder)))
        case UpdateWeights(folder, mode, version):
            staged = group.agree(lambda: engine.stage_weights(folder, mode))
            engine.swap_weights(replace(staged, version=version))
        case WakeUp():
            try:
                group.agree(lambda: _wake_up(engine))
            except ValueError:
                if not engine.asleep:
                    Engine.sleep(engine)
                raise


def _wake_up(engine: Engine) -> None:
    try:
        Engine.wake_up(engine)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"there is not enough memory to wake up: {error}") from error


def fingerprint(engine: Engine) -> int:
    """A checksum of the state of the running requests, as far as the host knows it.

    It covers the last report that was read, the tokens that were emitted and the number of weight swaps; it waits for
    no step that is under way.
    """
    running = engine.scheduler.running.items()
    emitted = [(row, s.request.request_id, s.prefilled, len(s.emitted), s.emitted[-4:]) for row, s in running]
    return zlib.crc32(repr((engine.weights_version, emitted)).encode(), zlib.crc32(engine.last_report_X.tobytes()))
