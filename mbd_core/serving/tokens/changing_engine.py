"""One engine that serves while its weights, its adapters and its memory change, one change after the other."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from mbd_core.checkpoint.base_values import check_base
from mbd_core.engine.config import SwapMode
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.adapters import AdapterInUse
from mbd_core.engine.memory.weights import WeightSource
from mbd_core.serving.tokens.async_engine import AsyncEngine
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import load_engine
from mbd_core.trace.recorder import TraceRecorder

UNLOAD_SECONDS = 600.0  # the wait for the end of requests that use an adapter
UNLOAD_PAUSE = 0.2
LOOK_SECONDS = 0.05  # between two checks whether requests have ended


class ChangingEngine:
    """A loaded model behind asyncio, with its current weights and adapters. Its methods belong to one event loop.

    changes  the lock of a change that takes several steps
    weights  the source of the weights ordered last; `None` for the model's own weights
    """

    def __init__(
        self,
        args: EndpointArgs,
        *,
        trace: TraceRecorder | None = None,
        fetch: Callable[[str], str | Path] = Path,
    ) -> None:
        """Load the model and capture its graphs. `trace` records the steps; `fetch` maps a folder or a storage URL to
        a local folder."""
        self.args, self._fetch = args, fetch
        self.loaded = load_engine(
            Path(args.model), args.engine, trace=trace, fp8=args.fp8, tensor_parallel=args.tensor_parallel
        )
        self.loaded.prepare()
        self.weights: Path | Literal["tensors"] | None = None
        self.adapters: dict[str, Path] = {}
        self.changes = asyncio.Lock()
        self.engine = AsyncEngine(self.loaded.engine, max_waiting=args.max_waiting)

    @property
    def weights_version(self) -> int:
        return self.loaded.engine.weights_version

    @property
    def asleep(self) -> bool:
        return self.loaded.engine.asleep

    async def arrange(self, *, weights: str | None, adapters: Mapping[str, str]) -> None:
        """Decode with a folder's weights (`None`: the model's own) and with these adapters, from the next step on.

        Running requests continue. An adapter in use stays until its requests have ended. Raises `ValueError` for
        weights or adapters that do not fit. Then the weights are unchanged, but some adapters may be loaded or
        unloaded.
        """
        folder = None if weights is None else await self._folder(weights)
        folders = {name: await self._folder(adapter) for name, adapter in adapters.items()}
        async with self.changes:
            for name in self.adapters.keys() - {n for n, f in folders.items() if self.adapters.get(n) == f}:
                await self._unload(name)
            for name, adapter_folder in folders.items():
                if name not in self.adapters:
                    if folder is None:  # other weights may be those of the adapter's base, or trained further
                        await asyncio.to_thread(check_base, adapter_folder, Path(self.args.model))
                    await self.engine.call(partial(Engine.load_adapter, name=name, folder=adapter_folder))
                    self.adapters[name] = adapter_folder
            if folder != self.weights:
                source = folder or Path(self.args.model)
                await self.engine.call(partial(Engine.update_weights, source=source))
                self.weights = folder

    async def _folder(self, name: str) -> Path:
        return Path(await asyncio.to_thread(self._fetch, name))

    async def _unload(self, name: str) -> None:
        """Unloads an adapter as soon as no request uses it. Raises `ValueError` after `UNLOAD_SECONDS`."""
        end = asyncio.get_running_loop().time() + UNLOAD_SECONDS
        while True:
            try:
                await self.engine.call(partial(Engine.unload_adapter, name=name))
            except AdapterInUse:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(UNLOAD_PAUSE)
            else:
                del self.adapters[name]
                return

    async def take_weights(
        self, source: str | Mapping[str, Tensor], *, version: int, mode: SwapMode = "preempt"
    ) -> None:
        """Replace the weights. `source` is a folder or the decoder's tensors by name; the new weights get the number
        `version`.

        Returns after the swap. With "wait" the swap follows the running requests, so that one version decodes each
        answer. Does nothing if the current weights are newer, or have this number and came from the same folder or
        from tensors too.

        Raises `ValueError`, without a change, if the weights do not fit, if weights of another source have this
        number, or if the engine sleeps.
        """
        origin: Path | Literal["tensors"]
        weights: WeightSource
        if isinstance(source, str):
            origin = weights = await self._folder(source)
        else:
            origin, weights = "tensors", source.items()
        async with self.changes:
            if version == self.weights_version and origin != self.weights:
                raise ValueError(
                    f"version {version} is the number of the present weights, from {self.weights or 'the model'}; "
                    "give a higher version"
                )
            if version <= self.weights_version:
                return
            await self.engine.call(partial(Engine.update_weights, source=weights, mode=mode, version=version))
            while await self.engine.call(lambda engine: engine.swap_waits):
                await asyncio.sleep(LOOK_SECONDS)
            self.weights = origin

    async def sleep(self, *, seconds: float, aborts: bool) -> int:
        """Refuse new requests, let running requests end or abort them, and free the memory. Returns the freed bytes.

        Raises `ValueError`, and goes on serving, if requests still run after `seconds`, or if the engine cannot sleep.
        """

        def try_to(idle: Engine) -> int | None:
            return None if idle.has_work else idle.sleep()

        async with self.changes:
            if self.asleep:
                return 0
            self.engine.closed = True
            try:
                if aborts:
                    await self.engine.abort_all()
                end = asyncio.get_running_loop().time() + seconds
                while (num_bytes := await self.engine.call(try_to)) is None:
                    if asyncio.get_running_loop().time() > end:
                        raise ValueError(
                            f"requests still run after {seconds:g} s; the server goes on. Abort them first"
                        )
                    await asyncio.sleep(LOOK_SECONDS)
            except BaseException:
                self.engine.closed = False
                raise
            return num_bytes

    async def wake_up(self) -> None:
        """Allocate the memory and accept requests again; does nothing if awake.

        Raises torch's error if memory lacks.
        """
        async with self.changes:
            if not self.engine.closed:
                return
            if self.asleep:
                await self.engine.call(Engine.wake_up)
            await self.engine.call(lambda _: self.loaded.prepare())
            self.engine.closed = False
