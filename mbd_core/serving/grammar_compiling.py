"""Compiling grammars beside the event loop and the engine, in threads of their own and in bounded time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mbd_core.decoding.guide import Guide
from mbd_core.decoding.request import Request
from mbd_core.engine.admission import RequestRefused

SECONDS = 10.0
THREADS = 2


class GrammarCompiler:
    """`compile` for coroutines; its threads start with the first grammar."""

    def __init__(self, compile: Callable[[Request], Guide | None], *, seconds: float = SECONDS) -> None:
        self._compile, self._seconds = compile, seconds
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="grammar")

    async def __call__(self, request: Request) -> Guide | None:
        """A request's compiled grammar, `None` where it has none. Raises `RequestRefused`."""
        if request.grammar is None:
            return None
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, request)
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(compiling)
        except TimeoutError:
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise RequestRefused(
                "grammar", f"the grammar was not compiled within {self._seconds:g} s; simplify it or try again"
            ) from None

    def stop(self) -> None:
        """End its threads as soon as they are idle; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
