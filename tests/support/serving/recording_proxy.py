"""A proxy that keeps what clients ask and how they are answered, and changes nothing of either."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

HOP_HEADERS = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
START_SECONDS = 60.0


@dataclass(frozen=True)
class Exchange:
    """One request, its JSON body if it has one, and the reply."""

    method: str
    path: str
    body: Any
    status: int
    reply: str

    @property
    def refusal(self) -> str | None:
        return None if self.status < 400 else f"{self.method} {self.path}: {self.status} {self.reply[:500]}"


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content.decode(errors="replace")


@contextlib.contextmanager
def recording_proxy(target: str, *, port: int = 0) -> Iterator[tuple[str, list[Exchange]]]:
    """The proxy's own URL before the server at `target`, and the exchanges so far."""
    exchanges: list[Exchange] = []
    context: dict[str, Any] = {}
    is_up = threading.Event()

    async def run() -> None:
        stop = context["stop"] = asyncio.Event()
        context["loop"] = asyncio.get_running_loop()
        async with ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False) as session:

            async def forward(request: web.Request) -> web.StreamResponse:
                content = await request.read()
                headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
                async with session.request(
                    request.method, target + request.raw_path, headers=headers, data=content
                ) as reply:
                    kept = {k: v for k, v in reply.headers.items() if k.lower() not in HOP_HEADERS}
                    response = web.StreamResponse(status=reply.status, headers=kept)
                    await response.prepare(request)
                    pieces: list[bytes] = []
                    try:
                        async for piece in reply.content.iter_any():
                            pieces.append(piece)
                            await response.write(piece)
                        await response.write_eof()
                    finally:  # a client may hang up before the end
                        text = b"".join(pieces).decode(errors="replace")
                        exchanges.append(Exchange(request.method, request.path, _json(content), reply.status, text))
                    return response

            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            context["port"] = runner.addresses[0][1]
            is_up.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert is_up.wait(START_SECONDS), "the proxy did not start"
    try:
        yield f"http://127.0.0.1:{context['port']}", exchanges
    finally:
        context["loop"].call_soon_threadsafe(context["stop"].set)
        thread.join(START_SECONDS)
