"""The API over an engine in this process, as a gateway has it over replicas in others."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from mbd_core.engine.engine_config import EngineConfig
from mbd_core.serving.endpoint_args import EndpointArgs
from mbd_core.serving.engine_service import EngineService
from mbd_core.serving.openai_errors import ApiError
from mbd_core.serving.openai_server import OpenAIServer
from mbd_core.serving.served_model import ServedModel

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
        log: logging.Logger | None = None,
    ) -> None:
        self.service, self.served = service, service.served_model()
        super().__init__(
            {service.args.name: self._model}, request_seconds=request_seconds, client_requests=client_requests, log=log
        )

    async def _model(self) -> ServedModel:
        return self.served

    async def stop(self) -> None:
        await super().stop()
        await self.service.stop()


def server_of(
    folder: Path, *, request_seconds: float | None = None, client_requests: int | None = None, **settings: Any
) -> LocalServer:
    """A server of two batch rows."""
    engine = EngineConfig(max_rows=2, num_pages=64)
    service = EngineService(EndpointArgs(folder=str(folder), name=MODEL, engine=engine, **settings))
    return LocalServer(service, request_seconds=request_seconds, client_requests=client_requests)


async def ask(server: LocalServer, route: str, **fields: Any) -> list[dict[str, Any]]:
    """The whole answer, or with `stream` its events but for the last, which is [DONE]."""
    body = json.dumps({"model": MODEL, "max_tokens": 60} | ROUTES[route] | fields).encode()
    answer = await getattr(server, route)(body)
    if not fields.get("stream"):
        return [await answer.whole()]
    events = [event async for event in answer.events(lambda error: ApiError(500, str(error)))]
    assert events[-1] == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def answers(folder: Path, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """What each request (route, fields) got, all sent together: its objects, or the error it was refused with."""
    server = server_of(folder)

    async def scenario() -> list[Any]:
        try:
            async with asyncio.timeout(LIMIT):
                coroutines = [ask(server, route, **fields) for route, fields in asked]
                return await asyncio.gather(*coroutines, return_exceptions=True)
        finally:
            await server.stop()

    return asyncio.run(scenario())
