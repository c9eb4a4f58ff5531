"""Orders of administrators to all replicas of a model: other weights, sleep, the end of what runs.

Every replica carries an order out, or the answer says which did not. What holds for replicas that start later stands
in the gateway (`Standing`), so orders that must last are refused where there are several gateways.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from mbd_core.engine.weights import SwapMode
from mbd_core.serving.api.errors import ApiError, FieldError, clip
from mbd_core.serving.api.requests import SleepOrder, WeightsUpdate
from mbd_core.serving.api.shapes import Order
from mbd_core.serving.tokens.stream import Asleep

ORDER_SECONDS = 3900.0  # for all replicas to carry out an order: longer than the longest wait that one can ask for


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


class Administration:
    """The orders to the replicas of one model, behind their handle.

    Those that last are carried out one after the other, each to its end, also when the client that asked has left:
    otherwise replicas could differ, and those that start later would know nothing of it.
    """

    _under_way: ClassVar[set[asyncio.Task[Order]]] = set()

    def __init__(
        self, handle: DeploymentHandle, standing: Standing, *, turn: asyncio.Lock, lasting: bool, may_be_empty: bool
    ) -> None:
        """`turn` is the model's. `lasting`: whether this gateway is the only one. `may_be_empty`: whether there may be
        no replica."""
        self._handle, self._standing = handle, standing
        self._lasting, self._may_be_empty = lasting, may_be_empty
        self._turn = turn

    async def update_weights(self, order: WeightsUpdate) -> Order:
        """Returns when all replicas decode with them."""
        return await self._in_turn(self._update_weights(order))

    async def _update_weights(self, update: WeightsUpdate) -> Order:
        self._check_lasting()
        if self._standing.asleep:
            raise ApiError(409, "the model sleeps, and its weights have no place; wake it up first", code="asleep")
        versions = [state["weights"]["version"] for state in await self._order("state")]
        if not versions:
            raise ApiError(409, "no replica runs that could take the weights; ask when one does", code="no_replica")
        own_version = 0 if self._standing.weights is None else self._standing.weights.version
        # A number that some replicas have and others have not is that of an order which is repeated.
        least = max(*versions, min(versions) + 1, own_version + 1)
        version = max(*versions, own_version) + 1 if update.version is None else update.version
        if version < least:
            why = f"must be at least {least}, more than the number of the newest weights"
            raise FieldError("version", why, value=version)
        order = WeightsOrder(folder=update.folder, version=version, mode=update.mode)
        replies = await self._order("update_weights", order)
        self._standing.weights = order
        return {"folder": update.folder, "version": version, "replicas": len(replies)}

    async def abort(self) -> Order:
        """End every request that replicas run or hold."""
        replies = await self._order("abort_all")
        return {"aborted": sum(replies), "replicas": len(replies)}

    async def sleep(self, order: SleepOrder) -> Order:
        """Returns when all replicas sleep; where one cannot, all are awake again."""
        return await self._in_turn(self._sleep(order))

    async def _sleep(self, order: SleepOrder) -> Order:
        self._check_lasting()
        self._standing.asleep = True
        try:
            if order.requests == "abort":
                await self._order("abort_all")
            num_bytes = await self._order("sleep", order.seconds, undone=True)
        except BaseException:
            self._standing.asleep = False
            await self._order("wake_up")
            raise
        return {"asleep": True, "freed_bytes": sum(num_bytes), "replicas": len(num_bytes)}

    async def wake_up(self) -> Order:
        """Returns when all replicas serve again."""
        return await self._in_turn(self._wake_up())

    async def _wake_up(self) -> Order:
        self._check_lasting()
        replies = await self._order("wake_up")
        self._standing.asleep = False
        return {"asleep": False, "replicas": len(replies)}

    async def _in_turn(self, order: Coroutine[Any, Any, Order]) -> Order:
        async def carry_out() -> Order:
            async with self._turn:
                return await order

        task = asyncio.create_task(carry_out())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    def _check_lasting(self) -> None:
        if not self._lasting:
            message = "this needs one gateway (gateways: 1): others would not know what holds for replicas that start"
            raise ApiError(409, message, code="several_gateways")

    async def _order(self, method: str, *arguments: Any, undone: bool = False) -> list[Any]:
        """What each replica returns; `ApiError` where one has not done it. `undone`: the others then undo it."""
        try:
            replies = await self._handle.broadcast(method, *arguments).results_async(
                timeout_s=ORDER_SECONDS, return_exceptions=True
            )
        except Exception as error:  # Serve has no one type for a deployment without replicas, or for one that is late
            if self._may_be_empty and not isinstance(error, TimeoutError):
                return []
            raise ApiError(503, f"no replica answers: {clip(str(error))}", code="no_replica") from error
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        if failures:
            raise _failure(failures, len(failures) if undone else len(replies))
        return list(replies)


def _failure(failures: list[BaseException], number: int) -> ApiError:
    """One error for those of several replicas; what all refuse alike has changed nothing."""
    causes = [error.cause if isinstance(error, RayTaskError) else error for error in failures]
    if len(causes) == number and all(isinstance(cause, ValueError) for cause in causes):
        return ApiError(409, str(causes[0]), code="refused")
    cause = f"{type(causes[0]).__name__}: {causes[0]}"
    message = f"{len(failures)} of {number} replicas have not done it; /health shows each one's state. {cause}"
    return ApiError(500, message, code="incomplete")
