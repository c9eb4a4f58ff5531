"""Orders of administrators to all replicas of a model (`mbd_core/serving/api/orders.py`), behind a Serve handle.

Every replica carries out an order, or the answer counts the failures. The gateway keeps the state for replicas that
start later (`Standing`). So orders that last are refused on a server with several gateways.
"""

import asyncio
from typing import Any, ClassVar

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from mbd_core.serving.api.errors import ApiError, clip
from mbd_core.serving.api.orders import ModelOrder, Standing
from mbd_core.serving.api.shapes import Order, ReplicaState

# time for all replicas to carry out an order: longer than the longest wait of an order
ORDER_SECONDS = 3900.0


class Administration:
    """The orders to the replicas of one model, behind their handle.

    Orders that last are carried out one after the other, each to its end, even if its client leaves. Otherwise
    replicas could differ, and later replicas would miss the order.
    """

    _under_way: ClassVar[set[asyncio.Task[Order]]] = set()

    def __init__(
        self, handle: DeploymentHandle, standing: Standing, *, turn: asyncio.Lock, lasting: bool, may_be_empty: bool
    ) -> None:
        """`turn` is the model's lock; `lasting`: whether this gateway is the only one; `may_be_empty`: whether the
        model may have no replica."""
        self._handle, self._standing = handle, standing
        self._lasting, self._may_be_empty = lasting, may_be_empty
        self._turn = turn

    async def carry_out(self, order: ModelOrder) -> Order:
        """Carry out an order at all replicas, and return the reply. Raises `ApiError`."""
        if not order.lasts:
            return await order.give(self, self._standing)
        task = asyncio.create_task(self._in_turn(order))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, order: ModelOrder) -> Order:
        async with self._turn:
            if not self._lasting:
                message = (
                    "this needs one gateway (gateways: 1): other gateways would not pass the order on to new replicas"
                )
                raise ApiError(409, message, code="several_gateways")
            return await order.give(self, self._standing)

    async def states(self) -> list[ReplicaState]:
        """The state of each replica; raises `ApiError` if a replica does not answer."""
        return await self._broadcast("state")

    async def apply(self, order: ModelOrder, *, undone: bool = False) -> list[Any]:
        """The result of `order.apply` at each replica. Raises `ApiError` if a replica fails; with `undone` the caller
        then undoes the order at the others."""
        return await self._broadcast("apply", order, undone=undone)

    async def _broadcast(self, method: str, *arguments: Any, undone: bool = False) -> list[Any]:
        try:
            replies = await self._handle.broadcast(method, *arguments).results_async(
                timeout_s=ORDER_SECONDS, return_exceptions=True
            )
        except Exception as error:  # Serve has no single type for a deployment that is late or has no replicas
            if self._may_be_empty and not isinstance(error, TimeoutError):
                return []
            raise ApiError(503, f"no replica answers: {clip(str(error))}", code="no_replica") from error
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        if failures:
            raise _failure(failures, len(failures) if undone else len(replies))
        return list(replies)


def _failure(failures: list[BaseException], number: int) -> ApiError:
    """One error for the errors of several replicas. If all replicas refused the order, nothing has changed (409)."""
    causes = [error.cause if isinstance(error, RayTaskError) else error for error in failures]
    if len(causes) == number and all(isinstance(cause, ValueError) for cause in causes):
        return ApiError(409, str(causes[0]), code="refused")
    cause = f"{type(causes[0]).__name__}: {causes[0]}"
    message = f"{len(failures)} of {number} replicas have not done it; /health shows each one's state. {cause}"
    return ApiError(500, message, code="incomplete")
