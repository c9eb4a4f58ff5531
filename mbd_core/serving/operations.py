"""What administrators ask of a server that runs: the bodies of these requests, and what is kept of them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from mbd_core.engine.weight_swap import SwapMode
from mbd_core.serving.strict_model import Strict
from mbd_core.serving.token_stream import Asleep

SLEEP_SECONDS = 600.0
MAX_VERSION = 2**53  # numbers that every reader of JSON keeps


class ModelOrder(Strict):
    """`model` may be left out where one is served."""

    model: str | None = None


class WeightsUpdate(ModelOrder):
    """Other weights of the same shapes.

    folder   a model folder on every machine with a replica, or a storage URL
    mode     `preempt`: they take their place at once, and requests that run go on with them; `wait`: once those have
             ended, and no other begins before
    version  their number, larger than that of the weights before (default: one more)
    """

    folder: Annotated[str, Field(min_length=1)]
    mode: SwapMode = "preempt"
    version: Annotated[int, Field(ge=1, lt=MAX_VERSION)] | None = None


class SleepOrder(ModelOrder):
    """What happens to requests that run or wait: `finish` lets them end, for `seconds` at most; `abort` ends them with
    what they have committed."""

    requests: Literal["finish", "abort"] = "finish"
    seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = SLEEP_SECONDS


@dataclass(frozen=True, kw_only=True)
class WeightsOrder:
    """`WeightsUpdate` as replicas get it."""

    folder: str
    version: int
    mode: SwapMode = "preempt"


@dataclass
class Standing:
    """What holds for a model's replicas, those included that start later.

    weights  the newest weights that were ordered
    asleep   whether they sleep, or are about to
    """

    weights: WeightsOrder | None = None
    asleep: bool = False

    def check_awake(self) -> None:
        """Raise `Asleep`."""
        if self.asleep:
            raise Asleep("the server sleeps; ask again when it was woken up")
