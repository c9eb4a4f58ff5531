"""One engine that serves while its weights, its adapters and its memory change, one change after the other."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.weights import AdapterInUse, SwapMode, WeightSource
from mbd_core.serving.tokens.async_engine import AsyncEngine
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import load_engine
from mbd_core.trace.recorder import TraceRecorder

UNLOAD_SECONDS = 600.0  # for the requests that use an adapter to end
UNLOAD_PAUSE = 0.2
LOOK_SECONDS = 0.05  # between two looks at an engine whose requests are to end


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
        """Load the model and capture its graphs; steps are recorded in `trace`. `fetch` gives the local folder of a
        folder or a storage URL."""
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

        Requests that run go on. An adapter that requests use stays until they have ended. Raises `ValueError` for
        what does not fit; what was arranged before then is as it was, but for adapters that were loaded or unloaded.
        """
        folder = None if weights is None else await self._folder(weights)
        folders = {name: await self._folder(adapter) for name, adapter in adapters.items()}
        async with self.changes:
            for name in self.adapters.keys() - {n for n, f in folders.items() if self.adapters.get(n) == f}:
                await self._unload(name)
            for name, adapter_folder in folders.items():
                if name not in self.adapters:
                    await self.engine.call(partial(Engine.load_adapter, name=name, folder=adapter_folder))
                    self.adapters[name] = adapter_folder
            if folder != self.weights:
                source = folder or Path(self.args.model)
                await self.engine.call(partial(Engine.update_weights, source=source))
                self.weights = folder

    async def _folder(self, name: str) -> Path:
        return Path(await asyncio.to_thread(self._fetch, name))

    async def _unload(self, name: str) -> None:
        """Unloads an adapter as soon as no request uses it; raises `ValueError` if a request uses it for too long."""
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
        """Decode with a folder's weights, or the decoder's tensors by name, as number `version`; returns when they are
        in place, which with "wait" is after the requests that run: each answer is of one version then. Weights of that
        number or a newer one stay.

        Raises `ValueError` for what does not fit, for weights from elsewhere of the same number, and asleep; nothing
        has changed then.
        """
        origin: Path | Literal["tensors"]
        weights: WeightSource
        if isinstance(source, str):
            origin = weights = await self._folder(source)
        else:
            origin, weights = "tensors", source.items()
        async with self.changes:
            if version == self.weights_version and origin != self.weights:
                raise ValueError(f"version {version} is the number of the weights of {self.weights or 'the model'}")
            if version <= self.weights_version:
                return
            await self.engine.call(partial(Engine.update_weights, source=weights, mode=mode, version=version))
            while await self.engine.call(lambda engine: engine.swap_waits):
                await asyncio.sleep(LOOK_SECONDS)
            self.weights = origin
