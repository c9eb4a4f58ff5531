"""A gateway and engine replicas in this process, over HTTP and without Ray: between them stand plain calls."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import uvicorn
from ray import serve

from actors.serving import gateway
from actors.serving import replica as engine_replica
from actors.serving.args import GatewayContent, ModelArgs, ServingArgs

START_SECONDS = 120.0
APP = "in-process"


class Response:
    """What a call of a streaming method gives: an iterator that can be cancelled."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._closing: asyncio.Future[None] | None = None

    def __aiter__(self) -> "Response":
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._items.aclose())


class Handle:
    """Replicas of a model; the first that lives takes every request."""

    def __init__(self, replicas: list[Any]) -> None:
        self.replicas = replicas
        self.limits = SimpleNamespace(remote=lambda: self.replicas[0].limits())
        self.describe = SimpleNamespace(remote=lambda: asyncio.to_thread(self.replicas[0].describe))

    def options(self, *, stream: bool, method_name: str) -> "Handle":
        assert stream and method_name == "generate"
        return self

    def remote(self, *arguments: Any) -> Response:
        return Response(self.replicas[0].generate(*arguments))

    def broadcast(self, method: str, *arguments: Any) -> Any:
        async def results(**_: Any) -> list[Any]:
            calls = (getattr(replica, method)(*arguments) for replica in self.replicas)
            return await asyncio.gather(*calls, return_exceptions=True)

        return SimpleNamespace(results_async=results)


def new_replica(args: ModelArgs) -> Any:
    return undecorated(engine_replica.EngineReplica)(args)


def undecorated(deployment: Any) -> Any:
    """The class under Serve's decorators, without what they add; `end` awaits its `__del__`, as Serve does."""
    kinds = deployment.func_or_class.__mro__
    kind = next(k for k in kinds if not asyncio.iscoroutinefunction(k.__init__))
    return type(kind.__name__, (kind,), {"__del__": lambda self: None, "end": kind.__del__})


@contextlib.contextmanager
def running_gateway(args: ServingArgs, *, num_replicas: int = 1) -> Iterator[tuple[str, list[Handle]]]:
    """The URL of a gateway before `num_replicas` of each model, and the models' handles."""
    is_up, stop = threading.Event(), threading.Event()
    context: dict[str, Any] = {}
    handles: list[Handle] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def serve_until(ended: Callable[[], bool]) -> None:
        for model in args.models:
            replicas = [new_replica(model) for _ in range(num_replicas)]
            for replica in replicas:
                await replica.reconfigure(model.content.values())
            handles.append(Handle(replicas))
        servable = undecorated(gateway.Gateway)(args, handles)
        servable.reconfigure(GatewayContent(adapters={}).values())
        context["servable"] = servable
        server = uvicorn.Server(uvicorn.Config(gateway.api, port=port, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        is_up.set()
        while not ended():
            await asyncio.sleep(0.02)
        server.should_exit = True
        await serving
        await servable.end()
        for handle in handles:
            for replica in handle.replicas:
                await replica.end()

    def serve_in_thread() -> None:
        try:
            asyncio.run(serve_until(stop.is_set))
        finally:
            is_up.set()

    def replica_context() -> Any:
        identity = SimpleNamespace(unique_id="replica")
        return SimpleNamespace(servable_object=context["servable"], app_name=APP, replica_id=identity)

    patches = [patch.object(module, "keep_to_loopback", lambda: None) for module in (engine_replica, gateway)]
    patches += [patch.object(module, "join_core_logs", lambda: None) for module in (engine_replica, gateway)]
    with contextlib.ExitStack() as stack:
        for patcher in (*patches, patch.object(serve, "get_replica_context", replica_context)):
            stack.enter_context(patcher)
        thread = threading.Thread(target=serve_in_thread, daemon=True)
        thread.start()
        try:
            assert is_up.wait(START_SECONDS), "the gateway did not start"
            assert "servable" in context, "the gateway failed; see the warning on its thread"
            yield f"http://127.0.0.1:{port}", handles
        finally:
            stop.set()
            thread.join(START_SECONDS)
