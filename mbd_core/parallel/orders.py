"""The messages of rank 0 to the other ranks: one `Setup`, then `Orders` before each step."""

import zlib
from dataclasses import dataclass
from typing import Literal

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.engine.admission import Admitted
from mbd_core.engine.engine import Engine
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import Parts


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message: what a follower builds its engine from, so that all ranks are set up alike.

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


Command = Add | Abort | Preempt | Prepare


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


def fingerprint(engine: Engine) -> int:
    """A checksum of the state of the running requests, as far as the host knows it.

    It covers the last report that was read and the tokens that were emitted; it waits for no step that is under way.
    """
    running = engine.scheduler.running.items()
    emitted = [(row, s.request.request_id, s.prefilled, len(s.emitted), s.emitted[-4:]) for row, s in running]
    return zlib.crc32(repr(emitted).encode(), zlib.crc32(engine.last_report_X.tobytes()))
