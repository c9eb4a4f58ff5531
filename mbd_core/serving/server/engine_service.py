"""One engine that serves, with its limits, health, measures and state. A replica's process runs it."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from mbd_core.decoding.blocks.methods import read_front
from mbd_core.engine.measures import EngineMeasures
from mbd_core.engine.parallel.group import RankLost
from mbd_core.engine.parallel.leader import ParallelEngine
from mbd_core.serving.api.requests import MAX_TOKENS_DEFAULT
from mbd_core.serving.api.shapes import Front, ReplicaState
from mbd_core.serving.tokens.changing_engine import ChangingEngine
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.served_model import EngineLimits, ServedModel
from mbd_core.serving.tokens.stream import EngineFailed
from mbd_core.trace.recorder import TraceRecorder


class EngineService(ChangingEngine):
    """A model's engine as a `TokenSource`, with its state and measures. `stop()` ends the engine."""

    def __init__(
        self,
        args: EndpointArgs,
        *,
        trace: TraceRecorder | None = None,
        fetch: Callable[[str], str | Path] = Path,
    ) -> None:
        """The arguments of `ChangingEngine`; `stop()` closes `trace`."""
        super().__init__(args, trace=trace, fetch=fetch)
        self._trace = trace
        self._sampling = args.sampling(self.loaded.defaults)
        self._front = read_front(self.loaded.defaults, block_size=self.loaded.engine.block_size)

    @property
    def defaults(self) -> dict[str, Any]:
        """The decoding and sampling of a request without such fields."""
        own = {"temperature": 0, "max_tokens": MAX_TOKENS_DEFAULT}
        return {**asdict(self.loaded.decoding({})), **own, **self._sampling}

    @property
    def limits(self) -> EngineLimits:
        """The limits that senders of requests need."""
        engine = self.loaded.engine
        draft = engine.config.draft_model
        return EngineLimits(
            admission=engine.admission,
            block_size=engine.block_size,
            generation=self.loaded.defaults,
            sampling=self._sampling,
            rows=engine.config.max_rows,
            capacity=self.engine.capacity,
            draft_model=None if draft is None else Path(draft).name,
        )

    def served_model(self) -> ServedModel:
        """The model with this engine as the source of its tokens."""
        return ServedModel(
            name=self.args.served_name,
            tokenizer=self.loaded.tokenizer,
            limits=self.limits,
            source=self.engine,
            call_form=self.args.call_form,
        )

    async def stop(self) -> None:
        """End the engine and its threads, and write the end of the trace."""
        await self.engine.stop()
        await asyncio.to_thread(self.loaded.close)
        if self._trace is not None:
            self._trace.close()

    def describe(self) -> str:
        """One line: device, attention kernel with reasons against other kernels, KV memory, default decoding."""
        engine = self.loaded.engine
        defaults = ", ".join(f"{name}={value}" for name, value in self.defaults.items() if value is not None)
        return (
            f"{self.args.served_name}: {self.loaded.backend}; {engine.attention.describe()}; "
            f"KV memory: {engine.kv_tokens:,} tokens in {engine.num_pages:,} pages; defaults: {defaults}"
        )

    def check_health(self) -> None:
        """Raises `EngineFailed` or `RankLost` if the engine can serve no more requests; never waits."""
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
        """The fraction of the KV memory that running requests hold and waiting prompts need; above 1, memory is
        short."""
        engine = self.loaded.engine
        pool = engine.scheduler.pool
        return 1.0 - pool.num_free / pool.capacity + self.engine.waiting_tokens / engine.kv_tokens

    def measures(self) -> EngineMeasures:
        """The engine's measures; requests that wait before the engine count as waiting."""
        load = self.engine.load
        return replace(self.loaded.engine.measures(), running=load.running, waiting=load.waiting)

    def state(self) -> ReplicaState:
        """The fields of `/health` on this replica."""
        engine, load = self.loaded.engine, self.engine.load
        pool = engine.scheduler.pool
        return {
            "ready": self.healthy and not self.engine.closed,
            "asleep": self.asleep,
            "weights": {
                "folder": None if self.weights == "tensors" else str(self.weights or self.args.model),
                "version": engine.weights_version,
            },
            "adapters": {name: str(folder) for name, folder in self.adapters.items()},
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
