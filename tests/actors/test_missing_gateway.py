"""Who asks before a gateway stands reads what is missing; who waits for an answer of one that stands, waits on."""

import asyncio
import json
from contextvars import Context, copy_context
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.context import _RequestContext, _serve_request_context

from actors.serving import gateway
from actors.serving.proxy import waiting
from actors.serving.proxy.waiting import GATEWAY, RefusedWithoutGateway, missing
from cluster.ray_private import answering

NO_ROOM = 'Deployment has 1 replicas that have taken more than 30s to be scheduled. Resources required: {"CPU": 0.1}'
FOREVER = 60.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("START_SECONDS", 0.1), ("RESTART_SECONDS", 1.0), ("LOOK_SECONDS", 0.01)):
        monkeypatch.setattr(waiting, name, seconds)


@dataclass
class Known:
    """What Serve's proxy knows of the deployment that answers, and whether a request has no replica of it."""

    name: str
    num_replicas: int
    has_none: bool = True

    def waits(self, call: Context) -> bool:
        return self.has_none


class Proxy:
    """Serve's proxy, which answers after so many seconds, and what it knows of gateways: the last value holds."""

    def __init__(self, *known: Known | None, answers_after: float) -> None:
        self.known, self.answers_after = list(known), answers_after
        self.num_asked = self.num_looks = 0
        self.was_stopped = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        try:
            await asyncio.sleep(self.answers_after)
        except asyncio.CancelledError:
            self.was_stopped = True
            await send({"type": "http.response.start", "status": 499, "headers": []})  # as Serve's does
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    def gateways(self, app: Any, path: str) -> Any:
        self.num_looks += 1
        return self.known.pop(0) if len(self.known) > 1 else self.known[0]


def asked(proxy: Proxy, *, path: str = "/health", num: int = 1) -> list[dict[str, Any]]:
    """What the last of `num` clients is sent."""
    sent = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ask() -> None:
        middleware = RefusedWithoutGateway(proxy, proxy.gateways, lambda: NO_ROOM)
        for _ in range(num):
            sent.clear()
            await middleware({"type": "http", "path": path}, receive, send)
        await asyncio.sleep(0.02)

    asyncio.run(ask())
    return sent


def refusal(sent: list[dict[str, Any]]) -> str:
    start, body = sent
    assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert error["code"] == "no_gateway"
    return error["message"]


def test_a_request_that_no_gateway_will_take_is_refused_with_what_is_missing() -> None:
    proxy = Proxy(Known(GATEWAY, 0), answers_after=FOREVER)
    assert NO_ROOM in refusal(asked(proxy)) and proxy.was_stopped


def test_a_proxy_without_an_application_is_not_asked() -> None:
    """Serve's own answer would be that the path does not exist."""
    proxy = Proxy(None, answers_after=0)
    assert NO_ROOM in refusal(asked(proxy)) and proxy.num_asked == 0


@pytest.mark.parametrize(
    ("known", "answers_after"),
    [
        ([Known(GATEWAY, 1)], 0),
        ([Known(GATEWAY, 1)], 0.3),  # longer than a request waits for a gateway
        ([None, Known(GATEWAY, 0), Known(GATEWAY, 1)], 0.1),  # one stands soon
        ([Known(GATEWAY, 1), Known(GATEWAY, 0)], 0.3),  # one has stood, and its successor may take longer
        ([Known(GATEWAY, 1, has_none=False), Known(GATEWAY, 0, has_none=False)], 1.5),  # its gateway ends after it
        ([Known(GATEWAY, 1, has_none=False), None], 1.5),  # and so does the application
        ([Known("Another", 0)], 0.2),  # another application, which Serve starts for a request
        ([Known("", 0)], 0),  # a path that nobody answers
    ],
)
def test_a_request_that_is_answered_is_left_alone(known: list[Any], answers_after: float) -> None:
    proxy = Proxy(*known, answers_after=answers_after)
    start, body = asked(proxy)
    assert (start["status"], body["body"], proxy.num_asked) == (200, b"answer", 1) and not proxy.was_stopped


def test_a_request_whose_gateways_are_lost_for_good_is_refused() -> None:
    proxy = Proxy(Known(GATEWAY, 1), Known(GATEWAY, 0), answers_after=FOREVER)
    assert NO_ROOM in refusal(asked(proxy)) and proxy.num_looks > 20, "after the longer wait"


def test_serve_s_own_routes_are_answered_without_a_gateway() -> None:
    assert asked(Proxy(Known(GATEWAY, 0), answers_after=0.2), path="/-/healthz")[0]["status"] == 200


def test_no_cluster_is_started_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(waiting.serve, "status", lambda: pytest.fail("Serve was asked"))
    assert missing() == waiting.UNKNOWN


def test_what_is_missing_is_in_serve_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.ray, "is_initialized", lambda: True)

    def status(application: str, *messages: str) -> Any:
        names = ["tiny-mbd", "other", GATEWAY, "more"]
        deployments = {name: SimpleNamespace(message=message) for name, message in zip(names, messages, strict=False)}
        return SimpleNamespace(applications={"mbd": SimpleNamespace(message=application, deployments=deployments)})

    for serve_status, words in (
        (status("", NO_ROOM, "", NO_ROOM, " another\n"), f"{NO_ROOM} another"),
        (status("", "an engine's", "", "a gateway's"), "a gateway's an engine's"),
        (status("Deploying app task failed"), "Deploying app task failed"),
        (status("", ""), "it is being started"),
        (SimpleNamespace(applications={}), "no application is deployed on this cluster"),
    ):
        monkeypatch.setattr(waiting.serve, "status", lambda serve_status=serve_status: serve_status)
        assert missing() == words


def test_a_controller_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise TimeoutError

    monkeypatch.setattr(waiting.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(waiting.serve, "status", fails)
    assert missing() == waiting.UNKNOWN


def test_the_proxy_knows_its_gateways_and_which_requests_they_have() -> None:
    """Serve's own router of paths, with handles as far as they are read."""
    request_router = SimpleNamespace(curr_replicas={"a": 1, "b": 2}, _pending_requests_by_id={"pending": None})

    def handle(endpoint: DeploymentID, info: EndpointInfo) -> Any:
        routers = {"New": None, GATEWAY: request_router}
        router = SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=routers[endpoint.name]))
        return SimpleNamespace(deployment_name=endpoint.name, _router=router)

    def call(request: str) -> Context:
        context = copy_context()
        context.run(_serve_request_context.set, _RequestContext(_internal_request_id=request))
        return context

    routes = ProxyRouter(handle)
    proxy = SimpleNamespace(_app=SimpleNamespace(_app=SimpleNamespace(proxy_router=routes)))
    assert answering(proxy, "/v1/models") is None
    routes.update_routes(
        {DeploymentID(GATEWAY, "mbd"): EndpointInfo("/v1"), DeploymentID("New", "new"): EndpointInfo("/new")}
    )
    old, new, none = (answering(proxy, path) for path in ("/v1/models", "/new", "/other"))
    assert old is not None and (old.name, old.num_replicas) == (GATEWAY, 2)
    assert new is not None and (new.name, new.num_replicas) == ("New", 0)
    assert none is not None and (none.name, none.num_replicas) == ("", 0)
    assert old.waits(call("pending")) and not old.waits(call("routed"))
    assert old.waits(copy_context()) and new.waits(call("routed"))


def test_the_gateway_has_the_name_that_is_looked_for() -> None:
    assert gateway.Gateway.name == GATEWAY
