"""Orders of administrators: the route and body of each, and what gateway and replicas do.

The gateway takes the body (`actors/serving/gateway.py`) and calls `give`, which
sends it to every replica (`actors/serving/administration.py`), and each replica calls `apply`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from mbd_core.engine.config import SwapMode
from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.api.parsing import Strict
from mbd_core.serving.api.shapes import Order, ReplicaState
from mbd_core.serving.tokens.stream import Asleep

if TYPE_CHECKING:
    from mbd_core.serving.tokens.changing_engine import ChangingEngine

MAX_VERSION = 2**53  # JSON readers keep whole numbers below it exact
SLEEP_SECONDS = 600.0


class Replicas(Protocol):
    """The replicas of a model, as the gateway reaches them."""

    async def states(self) -> Sequence[ReplicaState]:
        """The state of each. Raises `ApiError`."""

    async def apply(self, order: "ModelOrder", *, undone: bool = False) -> list[Any]:
        """The result of `order.apply` at each. Raises `ApiError` if one fails; with `undone` the others then undo the
        order."""


@dataclass
class Standing:
    """The state that all replicas of a model should have, also replicas that start later.

    weights  the newest ordered weights
    asleep   whether they sleep, or are about to sleep
    """

    weights: "WeightsUpdate | None" = None
    asleep: bool = False

    @property
    def version(self) -> int:
        """The number of the weights; 0 before any were ordered."""
        return 0 if self.weights is None or self.weights.version is None else self.weights.version

    def check_awake(self) -> None:
        """Raise `Asleep` if the replicas sleep."""
        if self.asleep:
            raise Asleep("the server sleeps; ask again when it was woken up")


class ModelOrder(Strict, ABC):
    # lasts  whether the order also holds for replicas that start later
    # query  the allowed query parameters, each with its only value
    path: ClassVar[str]
    lasts: ClassVar[bool] = True
    query: ClassVar[Mapping[str, str]] = MappingProxyType({})

    model: str | None = None
    """needed where several models are served"""

    @abstractmethod
    async def apply(self, engine: "ChangingEngine") -> Any:
        """Carry the order out at one replica. Raises `ValueError` if nothing has changed."""

    @abstractmethod
    async def give(self, replicas: Replicas, standing: Standing) -> Order:
        """Have all replicas carry the order out, and return the reply.

        Orders that last run one at a time. Raises `ApiError`.
        """


class WeightsUpdate(ModelOrder):
    """Other weights of the same shapes."""

    path = "/update_weights"

    folder: Annotated[str, Field(min_length=1)]
    """a model folder on every machine with a replica, or a storage URL; weights that do not fit are refused (409)"""
    mode: SwapMode = "preempt"
    """`preempt`: the swap is immediate, and running requests continue with the new weights; `wait`: the swap follows
    the end of the running requests, and new requests wait for it"""
    version: Annotated[int, Field(ge=1, lt=MAX_VERSION)] | None = None
    """the weights' number, larger than the last; default: the last plus one"""

    async def apply(self, engine: "ChangingEngine") -> None:
        assert self.version is not None, "`give` has numbered them"
        await engine.take_weights(self.folder, version=self.version, mode=self.mode)

    async def give(self, replicas: Replicas, standing: Standing) -> Order:
        if standing.asleep:
            raise ApiError(409, "the model sleeps, and its weights have no place; wake it up first", code="asleep")
        versions = [state["weights"]["version"] for state in await replicas.states()]
        if not versions:
            raise ApiError(409, "no replica runs that could take the weights; ask when one does", code="no_replica")
        own_version = standing.version
        # A version that only some replicas have belongs to a repeated order.
        least = max(*versions, min(versions) + 1, own_version + 1)
        version = max(*versions, own_version) + 1 if self.version is None else self.version
        if version < least:
            why = f"must be at least {least}, more than the number of the newest weights"
            raise FieldError("version", why, value=version)
        numbered = self.model_copy(update={"version": version})
        done = await replicas.apply(numbered)
        standing.weights = numbered
        return {"folder": self.folder, "version": version, "replicas": len(done)}


class SleepOrder(ModelOrder):
    path = "/sleep"
    query = MappingProxyType({"level": "1"})

    requests: Literal["finish", "abort"] = "finish"
    """`finish`: running and waiting requests are answered first; `abort`: they end with their committed tokens"""
    seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = SLEEP_SECONDS
    """how long `finish` waits; then 409, and the server goes on"""

    async def apply(self, engine: "ChangingEngine") -> int:
        """Returns the freed bytes. Raises the errors of `ChangingEngine.sleep`."""
        return await engine.sleep(seconds=self.seconds, aborts=self.requests == "abort")

    async def give(self, replicas: Replicas, standing: Standing) -> Order:
        """Returns when all replicas sleep; if one cannot, all are awake again."""
        standing.asleep = True
        try:
            num_bytes = await replicas.apply(self, undone=True)
        except BaseException:
            standing.asleep = False
            await replicas.apply(WakeUpOrder())
            raise
        return {"asleep": True, "freed_bytes": sum(num_bytes), "replicas": len(num_bytes)}


class WakeUpOrder(ModelOrder):
    path = "/wakeup"

    async def apply(self, engine: "ChangingEngine") -> None:
        await engine.wake_up()

    async def give(self, replicas: Replicas, standing: Standing) -> Order:
        done = await replicas.apply(self)
        standing.asleep = False
        return {"asleep": False, "replicas": len(done)}


class AbortOrder(ModelOrder):
    path = "/abort_requests"
    lasts = False

    async def apply(self, engine: "ChangingEngine") -> int:
        """End every running or waiting request. Returns their number."""
        return await engine.engine.abort_all()

    async def give(self, replicas: Replicas, standing: Standing) -> Order:
        aborted = await replicas.apply(self)
        return {"aborted": sum(aborted), "replicas": len(aborted)}


ORDERS: Mapping[str, type[ModelOrder]] = {
    order.path: order for order in (WeightsUpdate, SleepOrder, WakeUpOrder, AbortOrder)
}
