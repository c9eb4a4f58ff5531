"""A 503 for requests that wait while no gateway runs; Serve's own proxy would let them wait without a word.

A gateway may find no room on the cluster. The proxy knows which gateways run, and which gateway has a request. A
gateway that drains does not count as running, but keeps its requests. Serve's controller is asked why no gateway runs,
and only when a 503 must say it.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import copy_context

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.serving.proxy.answers import OWN_ROUTES, send_error
from cluster.ray_private import AnsweringDeployment, answering

GATEWAY = "Gateway"  # the deployment's name
START_SECONDS = 5.0  # a request's wait for the first gateway
RESTART_SECONDS = 60.0  # a request's wait for the next gateway after one has run, because a start takes seconds
LOOK_SECONDS = 0.5  # between two looks of a request at the gateways that the proxy knows
STATUS_SECONDS = 5.0  # time for Serve's controller to say what is missing
KEPT_SECONDS = 2.0  # how long the controller's answer counts for all requests
STARTING = "it is being started"
NOTHING = "no application is deployed on this cluster"
UNKNOWN = "Serve's controller does not say why"


def missing() -> str:
    """Why no gateway runs: the messages of Serve's applications and deployments, the gateways' first."""
    if not ray.is_initialized():  # Serve would start a cluster to ask
        return UNKNOWN
    try:
        applications = serve.status().applications.values()
    except (RayError, RayServeException, TimeoutError):
        return UNKNOWN
    if not applications:
        return NOTHING
    messages = [application.message.strip() for application in applications]
    for application in applications:
        deployments = sorted(application.deployments.items(), key=lambda item: item[0] != GATEWAY)
        messages += [deployment.message.strip() for _, deployment in deployments]
    return " ".join(dict.fromkeys(filter(None, messages))) or STARTING


class RefusedWithoutGateway:
    """The middleware: a request that no gateway has taken gets a 503 after a wait in which no gateway ran."""

    def __init__(
        self,
        app: ASGIApp,
        answering: Callable[[ASGIApp, str], AnsweringDeployment | None] = answering,
        missing: Callable[[], str] = missing,
    ) -> None:
        self._app, self._answering, self._missing = app, answering, missing
        self._has_stood = False
        self._status: asyncio.Future[str] | None = None
        self._status_until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        started = refused = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            if not refused:
                started = True
                await send(message)

        async def answer() -> None:
            await self._app(scope, receive, send_unless_refused)

        call: asyncio.Task[None] | None = None
        context = copy_context()  # of the call: Serve puts the request's id there
        asked: AnsweringDeployment | None = None  # the gateways, also once their application is deleted
        deadline: float | None = None  # while no gateway stands, and none has the request
        try:
            while True:
                known = self._answering(self._app, scope["path"])
                asked = known or asked
                stands = known is not None and known.name == GATEWAY and known.num_replicas > 0
                self._has_stood = self._has_stood or stands
                is_missed = known is None or (known.name == GATEWAY and not stands)
                if is_missed and (asked is None or asked.waits(context)):
                    patience = RESTART_SECONDS if self._has_stood else START_SECONDS
                    deadline = deadline or time.monotonic() + patience
                    if time.monotonic() >= deadline:
                        break
                else:
                    deadline = None
                if call is None and known is not None:  # Serve starts a deployment without replicas for a request
                    call = asyncio.get_running_loop().create_task(answer(), context=context)
                if call is None:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                await asyncio.wait({call}, timeout=LOOK_SECONDS)
                if started or call.done():
                    await call
                    return
            refused = True
        finally:
            if call is not None:
                call.cancel()
        text = f"no gateway stands, ask again later: {await self._reason()}"
        await send_error(send, scope["path"], 503, text, code="no_gateway", headers=[(b"retry-after", b"5")])

    async def _reason(self) -> str:
        """The answer of `missing`, which requests share for a moment."""
        if self._status is None or (self._status.done() and time.monotonic() > self._status_until):
            self._status = asyncio.ensure_future(asyncio.to_thread(self._missing))
            self._status_until = time.monotonic() + KEPT_SECONDS
        try:
            return await asyncio.wait_for(asyncio.shield(self._status), STATUS_SECONDS)
        except TimeoutError:
            return UNKNOWN
