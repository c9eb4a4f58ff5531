"""One engine that serves: loaded, stepped behind asyncio, and asked how it is. What a replica's process runs."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from mbd_core.decoding.blocks.methods import read_front
from mbd_core.engine.engine import Engine
from mbd_core.engine.measures import EngineMeasures
from mbd_core.engine.parallel.group import RankLost
from mbd_core.engine.parallel.leader import ParallelEngine
from mbd_core.engine.weights import AdapterInUse, SwapMode, WeightSource
from mbd_core.serving.api.requests import MAX_TOKENS_DEFAULT
from mbd_core.serving.api.shapes import Front, ReplicaState
from mbd_core.serving.tokens.async_engine import AsyncEngine
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import load_engine
from mbd_core.serving.tokens.served_model import EngineLimits, ServedModel
from mbd_core.serving.tokens.stream import EngineFailed
from mbd_core.trace.recorder import TraceRecorder

UNLOAD_SECONDS = 600.0  # for the requests that use an adapter to end
UNLOAD_PAUSE = 0.2
LOOK_SECONDS = 0.05  # between two looks at an engine whose requests are to end


class EngineService:
    """A model's engine as a `TokenSource`. Its methods belong to one event loop; `stop()` ends what it started."""

    def __init__(self, args: EndpointArgs, *, trace: TraceRecorder | None = None) -> None:
        """Load the model and capture its graphs. Steps are recorded in `trace`; `stop()` closes it."""
        self.args, self._trace = args, trace
        self.loaded = load_engine(
            Path(args.model), args.engine, trace=trace, fp8=args.fp8, tensor_parallel=args.tensor_parallel
        )
        self._sampling = args.sampling(self.loaded.defaults)
        self._front = read_front(self.loaded.defaults, block_size=self.loaded.engine.block_size)
        self.loaded.prepare()
        self._weights: Path | Literal["tensors"] | None = None
        self._adapters: dict[str, Path] = {}
        self._changes = asyncio.Lock()  # of weights, adapters and sleep: one after the other
        self.engine = AsyncEngine(self.loaded.engine, max_waiting=args.max_waiting)

    @property
    def defaults(self) -> dict[str, Any]:
        """The decoding and sampling of a request that asks for nothing."""
        own = {"temperature": 0, "max_tokens": MAX_TOKENS_DEFAULT}
        return {**asdict(self.loaded.decoding({})), **own, **self._sampling}

    @property
    def limits(self) -> EngineLimits:
        """What senders of requests need to know."""
        engine = self.loaded.engine
        return EngineLimits(
            admission=engine.admission,
            block_size=engine.block_size,
            generation=self.loaded.defaults,
            sampling=self._sampling,
            rows=engine.config.max_rows,
            capacity=self.engine.capacity,
        )

    def served_model(self) -> ServedModel:
        """The model with this engine as the source of its tokens."""
        return ServedModel(
            name=self.args.served_name, tokenizer=self.loaded.tokenizer, limits=self.limits, source=self.engine
        )

    async def arrange(self, *, weights: Path | None, adapters: Mapping[str, Path]) -> None:
        """Decode with a folder's weights (`None`: the model's own) and with these adapters, from the next step on.

        Requests that run go on. An adapter that requests use stays until they have ended. Raises `ValueError` for
        what does not fit; what was arranged before then is as it was, but for adapters that were loaded or unloaded.
        """
        async with self._changes:
            await self._arrange(weights, adapters)

    async def _arrange(self, weights: Path | None, adapters: Mapping[str, Path]) -> None:
        for name in self._adapters.keys() - {n for n, folder in adapters.items() if self._adapters.get(n) == folder}:
            await self._unload(name)
        for name, folder in adapters.items():
            if name not in self._adapters:
                await self.engine.call(partial(Engine.load_adapter, name=name, folder=folder))
                self._adapters[name] = folder
        if weights != self._weights:
            source = weights or Path(self.args.model)
            await self.engine.call(partial(Engine.update_weights, source=source))
            self._weights = weights

    async def update_weights(
        self, source: Path | Mapping[str, Tensor], *, version: int, mode: SwapMode = "preempt"
    ) -> None:
        """Decode with a folder's weights, or the decoder's tensors by name, number `version`; returns when they are in
        place, which with "wait" is after the requests that run: each answer is of one version then. Weights of that
        number or a newer one stay.

        Raises `ValueError` for what does not fit, for weights from elsewhere of the same number, and asleep; nothing
        has changed then.
        """
        async with self._changes:
            origin: Path | Literal["tensors"] = source if isinstance(source, Path) else "tensors"
            if version == self.weights_version and origin != self._weights:
                raise ValueError(f"version {version} is the number of the weights of {self._weights or 'the model'}")
            if version <= self.weights_version:
                return
            weights: WeightSource = source if isinstance(source, Path) else source.items()
            await self.engine.call(partial(Engine.update_weights, source=weights, mode=mode, version=version))
            while await self.engine.call(lambda engine: engine.swap_waits):
                await asyncio.sleep(LOOK_SECONDS)
            self._weights = origin

    async def abort_all(self) -> int:
        """End every request that runs or waits; how many."""
        return await self.engine.abort_all()

    async def sleep(self, *, seconds: float, abort: bool = False) -> int:
        """Take no more requests, let those that run end (or end them: `abort`), and give the engine's memory back; how
        many bytes.

        Raises `ValueError`, and goes on serving, where they have not ended after `seconds`, and where the engine
        cannot sleep.
        """

        def try_to(engine: Engine) -> int | None:
            return None if engine.has_work else engine.sleep()

        async with self._changes:
            if self.asleep:
                return 0
            self.engine.closed = True
            try:
                if abort:
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
        """Take the memory again, and requests; does nothing awake. Raises torch's error where the memory is taken."""
        async with self._changes:
            if not self.engine.closed:
                return
            if self.asleep:
                await self.engine.call(Engine.wake_up)
            await self.engine.call(lambda _: self.loaded.prepare())
            self.engine.closed = False

    @property
    def weights_version(self) -> int:
        return self.loaded.engine.weights_version

    @property
    def asleep(self) -> bool:
        return self.loaded.engine.asleep

    async def _unload(self, name: str) -> None:
        """Unload an adapter as soon as no request uses it; `ValueError` where one still does after a long time."""
        end = asyncio.get_running_loop().time() + UNLOAD_SECONDS
        while True:
            try:
                await self.engine.call(partial(Engine.unload_adapter, name=name))
            except AdapterInUse:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(UNLOAD_PAUSE)
            else:
                del self._adapters[name]
                return

    async def stop(self) -> None:
        """End the engine and its threads, and write the end of the trace."""
        await self.engine.stop()
        await asyncio.to_thread(self.loaded.close)
        if self._trace is not None:
            self._trace.close()

    def describe(self) -> str:
        """One line: device, attention kernel and why no other, KV memory, the decoding of a plain request."""
        engine = self.loaded.engine
        defaults = ", ".join(f"{name}={value}" for name, value in self.defaults.items() if value is not None)
        return (
            f"{self.args.served_name}: {self.loaded.backend}; {engine.attention.describe()}; "
            f"KV memory: {engine.kv_tokens:,} tokens in {engine.num_pages:,} pages; defaults: {defaults}"
        )

    def check_health(self) -> None:
        """Raises `EngineFailed` or `RankLost` if no request can be served any more; never waits."""
        self.engine.check_health()
        self.loaded.check_health()

    @property
    def healthy(self) -> bool:
        try:
            self.check_health()
        except (EngineFailed, RankLost):
            return False
        return True

    @property
    def kv_load(self) -> float:
        """The share of the KV memory that requests hold and the prompts that wait would: above 1 they lack it."""
        engine = self.loaded.engine
        pool = engine.scheduler.pool
        return 1.0 - pool.num_free / pool.capacity + self.engine.waiting_tokens / engine.kv_tokens

    def measures(self) -> EngineMeasures:
        """The engine's measures; those that wait before the engine wait too."""
        load = self.engine.load
        return replace(self.loaded.engine.measures(), running=load.running, waiting=load.waiting)

    def state(self) -> ReplicaState:
        """Whether requests are served, how many, and by what."""
        engine, load = self.loaded.engine, self.engine.load
        pool = engine.scheduler.pool
        return {
            "ready": self.healthy and not self.engine.closed,
            "asleep": self.asleep,
            "weights": {
                "folder": None if self._weights == "tensors" else str(self._weights or self.args.model),
                "version": engine.weights_version,
            },
            "adapters": {name: str(folder) for name, folder in self._adapters.items()},
            "forwards": sum(engine.counts.forwards.values()),
            "running": load.running,
            "waiting": load.waiting,
            "backend": self.loaded.backend,
            "tensor_parallel": self.args.tensor_parallel,
            "rank_sums": engine.rank_sums if isinstance(engine, ParallelEngine) else None,
            "attention": {"name": engine.attention.name, "not_chosen": engine.attention.reasons},
            "defaults": self.defaults,
            "speed_front": None if self._front is None else cast(Front, self._front.health_fields()),
            "engine": asdict(engine.config) | {"block_size": engine.block_size, "page_size": engine.page_size},
            "max_model_len": engine.admission.max_length,
            "kv_cache": {
                "num_pages": engine.num_pages,
                "page_size": engine.page_size,
                "tokens": engine.kv_tokens,
                "free_pages": pool.num_free,
            },
            "graphs": engine.graph_report(),
            "prefix_cache": {"looked_up": pool.lookups, "found": pool.hits},
        }
