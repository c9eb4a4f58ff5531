"""The API over an engine in this process, as a gateway has it over replicas in others."""

import logging
from pathlib import Path
from typing import Any

from mbd_core.engine.engine_config import EngineConfig
from mbd_core.serving.endpoint_args import EndpointArgs
from mbd_core.serving.engine_service import EngineService
from mbd_core.serving.openai_server import OpenAIServer
from mbd_core.serving.served_model import ServedModel

MODEL = "tiny"


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
