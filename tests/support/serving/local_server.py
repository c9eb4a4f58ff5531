"""The API over an engine in this process, as a gateway has it over replicas in others."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mbd_core.engine.config import EngineConfig
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.parsing import MAX_PROMPTS
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.server.openai_server import OpenAIServer
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.served_model import ServedModel

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
MODEL = "tiny"
LIMIT = 300  # seconds that requests may take together, on a busy machine
ROUTES: dict[str, dict[str, Any]] = {
    "complete": {"prompt": "Tom has 3 apples."},
    "chat": {"messages": [{"role": "user", "content": "Tom has 3 apples."}]},
}


class LocalServer(OpenAIServer):
    """`service` is the engine behind it, which `stop()` ends too."""

    def __init__(
        self,
        service: EngineService,
        *,
        request_seconds: float | None = None,
        client_requests: int | None = None,
        body_prompts: int = MAX_PROMPTS,
        log: logging.Logger | None = None,
    ) -> None:
        self.service, self.served = service, service.served_model()
        super().__init__(
            {service.args.name: self._model},
            request_seconds=request_seconds,
            client_requests=client_requests,
            body_prompts=body_prompts,
            log=log,
        )

    async def _model(self) -> ServedModel:
        return self.served

    async def stop(self) -> None:
        await super().stop()
        await self.service.stop()


class Stoppable(Protocol):
    async def stop(self) -> None: ...


def run(server: Stoppable, scenario: Callable[[], Awaitable[T]]) -> T:
    """The result of a scenario, which may take `LIMIT` seconds; the server is stopped after it."""

    async def limited() -> T:
        try:
            async with asyncio.timeout(LIMIT):
                return await scenario()
        finally:
            await server.stop()

    return asyncio.run(limited())


def server_of(
    folder: Path,
    *,
    num_pages: int = 64,
    request_seconds: float | None = None,
    client_requests: int | None = None,
    body_prompts: int = MAX_PROMPTS,
    **settings: Any,
) -> LocalServer:
    """A server of two batch rows."""
    engine = EngineConfig(max_rows=2, num_pages=num_pages)
    service = EngineService(EndpointArgs(model=str(folder), name=MODEL, engine=engine, **settings))
    return LocalServer(
        service, request_seconds=request_seconds, client_requests=client_requests, body_prompts=body_prompts
    )


async def ask(server: LocalServer, route: str, **fields: Any) -> list[dict[str, Any]]:
    """The whole answer, or with `stream` its events but for the last, which is [DONE]."""
    body = json.dumps({"model": MODEL, "max_tokens": 60} | ROUTES[route] | fields).encode()
    answer = await getattr(server, route)(body)
    if not fields.get("stream"):
        return [await answer.whole()]
    events = [event async for event in answer.events(lambda error: ApiError(500, str(error)))]
    assert events[-1] == "data: [DONE]\n\n"
    return [json.loads(event.partition("data: ")[2]) for event in events[:-1]]


def answers(folder: Path, *requests: tuple[str, dict[str, Any]], num_pages: int = 64, **settings: Any) -> list[Any]:
    """What each request (route, fields) got, all sent together: its objects, or the error it was refused with."""
    server = server_of(folder, num_pages=num_pages, **settings)

    async def scenario() -> list[Any]:
        coroutines = [ask(server, route, **fields) for route, fields in requests]
        return await asyncio.gather(*coroutines, return_exceptions=True)

    return run(server, scenario)


def openai_client(server: LocalServer) -> "openai.AsyncOpenAI":
    """OpenAI's own client, whose HTTP ends at the server in this process."""
    import httpx
    import openai

    async def handle(request: httpx.Request) -> httpx.Response:
        route = {"/v1/chat/completions": server.chat, "/v1/completions": server.complete}[request.url.path]
        try:
            answer = await route(request.content)
        except ApiError as error:
            return httpx.Response(error.status, json=error.body)
        if not answer.streamed:
            return httpx.Response(200, json=await answer.whole())

        async def body() -> AsyncIterator[bytes]:
            async for event in answer.events(lambda error: ApiError(500, str(error))):
                yield event.encode()

        return httpx.Response(200, content=body(), headers={"content-type": "text/event-stream"})

    http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return openai.AsyncOpenAI(base_url="http://local/v1", api_key="none", http_client=http, max_retries=0)
