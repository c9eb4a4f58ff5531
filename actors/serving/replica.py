"""A replica of a model: one engine in a Serve actor, which takes requests of tokens and streams tokens.

The gateway handles HTTP, text and retries (`actors/serving/gateway.py`). A replica whose engine has failed ends its
process, so that Serve starts another replica and the gateways continue elsewhere.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from actors.paths import NO_PATHS, JobPaths, this_host
from actors.serving.args import EngineContent, ModelArgs, ServingArgs
from actors.serving.logs import join_core_logs, keep_to_loopback
from actors.serving.metrics import ENGINE_MEASURES, Exporter, ExportTimer
from actors.serving.scaling import KV_LOAD, REQUESTS, TokenPolicy
from actors.serving.tracing import annotate
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.engine.parallel.group import RankLost
from mbd_core.serving.api.orders import ModelOrder, WeightsUpdate
from mbd_core.serving.api.shapes import ReplicaState
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.tokens.served_model import EngineLimits
from mbd_core.serving.tokens.stream import EngineFailed, ReplicaLost
from mbd_core.trace.recorder import TraceRecorder

log = logging.getLogger("ray.serve")

TRACE_ROWS_PER_FILE, TRACE_FILES = 20_000, 64
GATEWAY_CPUS = 0.1  # of a gateway, which waits most of the time; each replica takes that much less, to leave room
GATEWAY_BUNDLE = {"CPU": GATEWAY_CPUS}  # the smallest process of an application: nodes without room for it get none
STOP_SECONDS = 10.0  # time for a replica to stop after its last request
PREFIX_TOKENS = 16  # page size for routing, if the engine chooses its own page size
LAST_WORDS_SECONDS = 0.5  # between an engine's failure and its process's end, so that waiting requests learn of it


def note_end(output: Output) -> None:
    """Write a request's counts to the log and to its span."""
    counts = output.counts
    numbers: dict[str, str | int | float] = {
        "finish_reason": output.finish_reason,
        "prompt_tokens": counts.num_prompt_tokens,
        "cached_tokens": counts.num_cached_tokens,
        "tokens": counts.num_tokens,
        "forwards": counts.num_forwards,
        "preemptions": counts.num_preemptions,
        "queue_seconds": round(counts.queue_seconds, 6),
        "prompt_seconds": round(counts.prompt_seconds, 6),
        "decode_seconds": round(counts.decode_seconds, 6),
    }
    log.info("request ended", extra={"engine_request": output.request_id, **numbers})
    annotate(**numbers)


@serve.deployment
class EngineReplica:
    """A thin coat over `EngineService`."""

    def __init__(self, model: ModelArgs, paths: JobPaths = NO_PATHS) -> None:
        args = model.checked(paths.fetch)
        torch.set_num_threads(args.threads)
        join_core_logs()
        keep_to_loopback()
        trace = self._traces = None
        if args.trace is not None:
            self._traces = args.trace / f"replica-{serve.get_replica_context().replica_id.unique_id}"
            trace = TraceRecorder(folder=self._traces, rows_per_file=TRACE_ROWS_PER_FILE, max_files=TRACE_FILES)
        self.service = EngineService(args, trace=trace, fetch=paths.fetch)
        self._exports = ExportTimer(Exporter(ENGINE_MEASURES, lambda: {args.served_name: self.service.measures()}))
        self._ending = self._serves = False
        self._refusal: str | None = None  # why the newest content was not adopted
        log.info(self.describe())

    async def __del__(self) -> None:
        """Awaited by Serve when it ends a replica in good order."""
        if hasattr(self, "_exports"):  # the model could be loaded
            await asyncio.to_thread(self._exports.stop)
            await self.service.stop()

    async def reconfigure(self, content: dict[str, Any]) -> None:
        """Adopt `EngineContent`; Serve calls it at the start and after each change.

        At the start, bad content is an error. Later the replica keeps its old content, and `/health` says why, because
        an error would make Serve end a healthy replica.
        """
        try:
            new_content = EngineContent.read(content)
            await self.service.arrange(weights=new_content.weights, adapters=new_content.adapters)
        except ValueError as error:
            if not self._serves:
                raise
            log.error("weights or adapters were not taken over", exc_info=error)
            self._refusal = str(error)
        else:
            self._serves, self._refusal = True, None

    async def generate(
        self, request: Request, key: str = "", weights: WeightsUpdate | None = None
    ) -> AsyncIterator[StepOutput | None]:
        """A `None` once the engine has accepted the request, then the request's steps. `weights` are the weights
        ordered for all replicas; a replica that started after the order adopts them first.

        Raises `RequestRefused`, `TooManyRequests`, `Asleep`, and `ReplicaLost` if the engine has failed or cannot
        adopt the weights.
        """
        try:
            if weights is not None and (weights.version or 0) > self.service.weights_version:
                await self._follow(weights)
            stream = await self.service.engine.open(request, key=key)
            try:
                yield None
                async for step in stream:
                    if step.output is not None:
                        note_end(step.output)
                    yield step
            finally:
                stream.close()
        except EngineFailed as error:
            self._end(error)
            raise ReplicaLost(str(error)) from error

    async def _follow(self, weights: WeightsUpdate) -> None:
        try:
            await self.apply(weights)
        except ValueError as error:
            log.error("weights that were ordered before this replica started cannot be taken over", exc_info=error)
            raise ReplicaLost(str(error)) from error

    async def apply(self, order: ModelOrder) -> Any:
        """Carry out an administrator's order, which every replica gets."""
        return await order.apply(self.service)

    # -- state and measures -------------------------------------------------------------------------------------

    async def limits(self) -> EngineLimits:
        """The limits against which gateways check requests."""
        return self.service.limits

    def describe(self) -> str:
        """The start line, and where this replica's traces lie."""
        if self._traces is None:
            return self.service.describe()
        traces = f"step traces of this replica: {self._traces} on {this_host()}"
        return f"{self.service.describe()}\n{traces}"

    async def state(self) -> ReplicaState:
        """This replica's part of `/health`."""
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "refused_content": self._refusal,
            **self.service.state(),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for a model with autoscaling."""
        load = self.service.engine.load
        return {REQUESTS: float(load.running + load.waiting), KV_LOAD: self.service.kv_load}

    def check_health(self) -> None:
        """Called by Serve. A replica whose engine has failed ends at once, not after Serve's three failed checks."""
        try:
            self.service.check_health()
        except (EngineFailed, RankLost) as error:
            self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        if self._ending:
            return
        self._ending = True
        log.error("this replica ends, because its engine has failed", exc_info=error)
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, os._exit, 1)


def engine_replicas(args: ServingArgs, model: ModelArgs, paths: JobPaths = NO_PATHS) -> serve.Application:
    """A model's replicas as a Serve deployment.

    A replica refuses requests beyond its engine's limit. Serve's queue, in which requests wait while there is no
    replica, is bounded too. Replicas on CPUs divide the machine's memory for keys and values, because they may share a
    machine. A replica that Serve ends in a redeployment gets no new requests, and has `drain_seconds` to finish its
    requests before it is killed.
    """
    engine, topology = model.engine, args.topology(model)
    capacity = engine.max_rows + model.max_waiting
    if args.device == "cpu":
        engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / model.most_replicas)
    return EngineReplica.options(  # type: ignore[attr-defined]  # Serve's decorators are not typed through
        name=model.served_name.replace("/", "-").replace("#", "-"),
        user_config=model.content.values(),
        **_number(model),
        **_routing(model),
        max_ongoing_requests=2 * capacity,
        max_queued_requests=2 * capacity * model.most_replicas,
        max_constructor_retry_count=2,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=args.drain_seconds + STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": topology.num_cpus - GATEWAY_CPUS, "num_gpus": topology.num_gpus},
    ).bind(replace(model.without_content(), engine=engine), paths)


def _number(model: ModelArgs) -> dict[str, Any]:
    """Serve's options for the number of replicas."""
    scaling = model.replicas
    if isinstance(scaling, int):
        return {"num_replicas": scaling}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min,
            max_replicas=scaling.max,
            target_ongoing_requests=scaling.target_requests,
            upscale_delay_s=scaling.up_seconds,
            downscale_delay_s=scaling.down_seconds,
            look_back_period_s=scaling.window_seconds,
            policy=AutoscalingPolicy(
                policy_function=TokenPolicy, policy_kwargs={"target_kv_load": scaling.target_kv_load}
            ),
        )
    }


def _routing(model: ModelArgs) -> dict[str, Any]:
    """Serve's options for the choice of a request's replica; `load` uses Serve's default."""
    if model.routing == "load" or model.most_replicas == 1 or not model.engine.prefix_caching:
        return {}
    settings = {"page_size": model.engine.page_size or PREFIX_TOKENS, "balance": model.engine.max_rows // 2}
    return {
        "request_router_config": RequestRouterConfig(
            request_router_class="actors.serving.routing.PrefixRouter", request_router_kwargs=settings
        )
    }
