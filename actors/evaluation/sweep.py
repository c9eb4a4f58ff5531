"""A sweep's executor on Ray: a pool of actors that decode, tasks that grade, and one actor that times."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from actors.evaluation.packed_parts import pack, process_part, unpack
from actors.paths import NO_PATHS, JobPaths, known_paths, model_paths
from cluster import local
from cluster.failures import CLUSTER_FAILURES, failure_text, reason
from cluster.topology import plan_topology
from mbd_core.batch.deaths import NO_SAMPLES, Attempts
from mbd_core.batch.decoding import DecodeStage
from mbd_core.batch.decoding_model import DecodingModel, ModelRefused
from mbd_core.batch.executor import ExecutorFailed
from mbd_core.batch.parts import NumberedTable
from mbd_core.batch.postprocess import Postprocess
from mbd_core.batch.timed_cases import TimedCase
from mbd_core.batch.timing import TimedStage, timing_engine
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.grading.part_grading import Grading
from mbd_core.evaluation.sweep.sweep import Sweep
from mbd_core.serving.tokens.load import load_engine

ModelLoader = Callable[[str, EngineConfig], DecodingModel]


def loader(models: Mapping[str, str], *, tensor_parallel: int, paths: JobPaths = NO_PATHS) -> ModelLoader:
    """A function that loads a model by its name in the rows. `models` maps names to arguments of `paths.fetch`."""

    def load(name: str, engine: EngineConfig) -> DecodingModel:
        folder = model_folder(paths.fetch(models[name], url_weights=engine.url_weights))
        if engine.draft_model is not None:
            engine = replace(engine, draft_model=paths.fetch(engine.draft_model))
        loaded = load_engine(folder, engine, tensor_parallel=tensor_parallel)
        loaded.prepare()
        return DecodingModel(loaded.engine, loaded.tokenizer)

    return load


class DecodeActor:
    """`DecodeStage` in an actor.

    A call gets one packed part, so that Ray Data neither joins nor splits parts. If the actor's process dies, Ray
    restarts the actor and repeats the call. `attempts`, an actor of `Attempts`, limits the repetitions.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        engine: EngineConfig,
        *,
        tensor_parallel: int = 1,
        paths: JobPaths = NO_PATHS,
        attempts: "ActorHandle[Attempts] | None" = None,
    ) -> None:
        load = loader(models, tensor_parallel=tensor_parallel, paths=paths)
        self._stage, self._attempts = DecodeStage(lambda name: load(name, engine)), attempts

    def __call__(self, packed: pa.Table) -> pa.Table:
        """The decoded part; without rows if the part killed too many processes."""
        assert self._attempts is not None
        number, table = unpack(packed)
        if not ray.get(self._attempts.begin.remote(number)):
            return pack(number, NO_SAMPLES)
        rows = self.decode(table)
        ray.get(self._attempts.end.remote(number))
        return pack(number, rows)

    def decode(self, table: pa.Table) -> pa.Table:
        return self._stage(table)

    def close(self) -> None:
        self._stage.close()


class TimingActor:
    """`TimedStage` in an actor."""

    def __init__(
        self,
        models: Mapping[str, str],
        engine: EngineConfig,
        *,
        tensor_parallel: int,
        paths: JobPaths,
        concurrency: int,
    ) -> None:
        load = loader(models, tensor_parallel=tensor_parallel, paths=paths)
        self._stage = TimedStage(
            lambda name, buffer_size: load(name, timing_engine(engine, buffer_size, concurrency=concurrency)),
            concurrency=concurrency,
        )

    def time(self, case: TimedCase, *, left_out: Collection[int] = ()) -> pa.Table:
        return self._stage(case, left_out=left_out)

    def close(self) -> None:
        self._stage.close()


@contextmanager
def ray_executor(
    sweep: Sweep,
    *,
    num_engines: int,
    concurrency: int,
    urls: Mapping[str, str] | None = None,
    isolated: bool = False,
    address: str | None = None,
    say: Callable[[str], object] = print,
) -> Iterator["RayExecutor"]:
    """An executor on the cluster at `address` or `RAY_ADDRESS`, or on a new cluster that ends with the block.

    Raises the errors of `RayExecutor` and `known_paths`.
    """
    num_cpus = max(4, num_engines * sweep.tensor_parallel + 2)
    is_ours = local.connect(address=address, num_cpus=num_cpus, worker_logs=False)
    try:
        executor = RayExecutor(
            sweep, Grading(isolated=isolated), num_engines=num_engines, concurrency=concurrency, urls=urls
        )
        models = model_paths("--models", *executor.models.values())
        models += model_paths("--draft-model", sweep.engine.draft_model)
        with known_paths(models, bundle=executor.topology.bundle, say=say) as executor.paths:
            yield executor
    finally:
        if is_ours:
            local.disconnect()


class RayExecutor:
    """An executor on the connected cluster. On a cluster with GPUs each rank of an engine takes a GPU.

    Engines on CPUs may share a machine's memory, so each engine gets an equal part of it for its KV pages. `urls` maps
    the folders of fetched models to their URLs, and each node fetches these models for itself. `paths` says where a
    node finds the other models.

    Raises `ClusterTooSmall` if not all engines find room, or if they leave no CPU for `postprocess`. Without the check
    Ray would wait forever.
    """

    def __init__(
        self,
        sweep: Sweep,
        postprocess: Postprocess,
        *,
        num_engines: int,
        concurrency: int = 1,
        urls: Mapping[str, str] | None = None,
    ) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.topology = plan_topology(nodes, processes=num_engines, ranks=sweep.tensor_parallel, spare_cpus=1)
        self.engine, self.postprocess, self.num_engines = sweep.engine, postprocess, num_engines
        self.on_gpu = self.topology.num_gpus > 0
        if not self.on_gpu:
            self.engine = replace(self.engine, kv_memory_fraction=self.engine.kv_memory_fraction / num_engines)
        self.cluster_cpus: float | None = sum(node.get("CPU", 0.0) for node in nodes)
        self.models = {name: (urls or {}).get(folder, folder) for name, folder in sweep.models.items()}
        self.paths = NO_PATHS
        self._concurrency = concurrency

    def decode(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        ray.data.DataContext.get_current().enable_progress_bars = False  # the sweep shows one bar for all parts
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        engines = self.topology
        attempts = ray.remote(Attempts).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        processed_parts = (
            ray.data.from_arrow([pack(number, table) for number, table in tables])
            .map_batches(
                DecodeActor,
                fn_constructor_args=(self.models, self.engine),
                fn_constructor_kwargs={"tensor_parallel": engines.ranks, "paths": self.paths, "attempts": attempts},
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=engines.processes),
                num_cpus=engines.num_cpus,
                num_gpus=engines.num_gpus,
            )
            .map_batches(
                process_part,
                fn_kwargs={"postprocess": self.postprocess},
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=1,
            )
        )
        with cluster_errors():
            for packed in processed_parts.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0):
                yield unpack(packed)

    def process(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        process = ray.remote(num_cpus=1)(process_part)
        waiting: list[Any] = []
        with cluster_errors():
            for number, table in tables:
                waiting.append(process.remote(pack(number, table), postprocess=self.postprocess))
                ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                yield from (unpack(ray.get(part)) for part in ready)
            yield from (unpack(ray.get(part)) for part in waiting)

    def time(self, cases: Sequence[TimedCase], *, left_out: Collection[int]) -> Iterator[NumberedTable]:
        actor = (
            ray.remote(TimingActor)
            .options(
                num_cpus=self.topology.num_cpus, num_gpus=self.topology.num_gpus, max_restarts=3, max_task_retries=3
            )
            .remote(
                self.models,
                self.engine,
                tensor_parallel=self.topology.ranks,
                paths=self.paths,
                concurrency=self._concurrency,
            )
        )
        try:
            with cluster_errors():
                for case in cases:
                    yield case.number, ray.get(actor.time.remote(case, left_out=left_out))
                ray.get(actor.close.remote())
        finally:
            ray.kill(actor)


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Translates failures: a model that an actor refuses raises `ModelRefused`, any other failure `ExecutorFailed`."""
    try:
        yield
    except CLUSTER_FAILURES as error:
        refusal = model_refusal(error) if isinstance(error, RayTaskError) else None
        if refusal is not None:
            raise refusal from error
        raise ExecutorFailed(reason(error), failure_text(error)) from error


def model_refusal(error: RayTaskError) -> ModelRefused | None:
    """The `ModelRefused` that an actor raised. One line of Ray's text has the exception's class and message."""
    refusal = re.search(rf"^\S*{ModelRefused.__name__}: (.*)$", str(error), re.MULTILINE)
    return None if refusal is None else ModelRefused(refusal[1])
