"""A sweep on Ray Data: a pool of actors that decode, then tasks that grade, over tables of samples."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayTaskError

from cluster.storage import fetch_model
from cluster.topology import Topology, plan_topology
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.evaluation.decode_stage import DecodeStage, DecodingModel, ModelRefused
from mbd_core.evaluation.grade_stage import grade_table
from mbd_core.evaluation.sample_tables import PLANNED_COLUMNS
from mbd_core.evaluation.sweep_plan import Sweep
from mbd_core.serving.load import load_engine


class DecodeActor:
    """`DecodeStage` in an actor: `models` maps the names in the rows to what `fetch_model` takes."""

    def __init__(self, models: Mapping[str, str], engine: EngineConfig, *, tensor_parallel: int = 1) -> None:
        def load(name: str) -> DecodingModel:
            loaded = load_engine(model_folder(fetch_model(models[name])), engine, tensor_parallel=tensor_parallel)
            loaded.prepare()
            return DecodingModel(loaded.engine, loaded.tokenizer)

        self._stage = DecodeStage(load)

    def __call__(self, table: pa.Table) -> pa.Table:
        return self._stage(table)

    def close(self) -> None:
        self._stage.close()


@dataclass(frozen=True, kw_only=True)
class EnginePool:
    """The engines that decode a sweep, what each has of the connected cluster, and the cluster's CPUs."""

    engine: EngineConfig
    topology: Topology
    cluster_cpus: float


def plan_pool(sweep: Sweep, *, num_engines: int) -> EnginePool:
    """The pool for a sweep on the connected cluster, a GPU a rank if it has GPUs.

    Engines on CPUs may share a machine's memory, so each sizes its KV pages from its part of it. Raises
    `ClusterTooSmall` if not all engines find room, or if they leave no CPU for grading: Ray would wait forever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    topology = plan_topology(nodes, processes=num_engines, ranks=sweep.tensor_parallel, spare_cpus=1)
    engine = sweep.engine
    if topology.num_gpus == 0:
        engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / num_engines)
    return EnginePool(engine=engine, topology=topology, cluster_cpus=sum(node.get("CPU", 0.0) for node in nodes))


def run_sweep(sweep: Sweep, pool: EnginePool, *, urls: Mapping[str, str] | None = None) -> Iterator[pa.Table]:
    """Decode and grade on the connected cluster; tables of graded samples as they come, in no particular order.

    `urls` maps the folders of models that were fetched to where they come from: each node fetches them for itself.
    Raises `ModelRefused` if an actor cannot load a model, which only its machine can find out.
    """
    ray.data.DataContext.get_current().enable_progress_bars = False  # `collect_samples` shows one for the whole sweep
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    models = {name: (urls or {}).get(folder, folder) for name, folder in sweep.models.items()}
    samples = pa.Table.from_pylist(list(sweep.rows()), schema=PLANNED_COLUMNS)
    engines = pool.topology
    rows_per_call = min(4 * pool.engine.max_rows, -(-len(samples) // engines.processes))
    parts = [samples.slice(start, rows_per_call) for start in range(0, len(samples), rows_per_call)]
    graded = (
        ray.data.from_arrow(parts)
        .map_batches(
            DecodeActor,
            fn_constructor_kwargs={"models": models, "engine": pool.engine, "tensor_parallel": engines.ranks},
            batch_size=rows_per_call,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=engines.processes),
            num_cpus=engines.num_cpus,
            num_gpus=engines.num_gpus,
        )
        .map_batches(grade_table, batch_size=rows_per_call, batch_format="pyarrow", num_cpus=1)
    )
    try:
        yield from graded.iter_batches(batch_size=None, batch_format="pyarrow")
    except RayTaskError as error:
        # Ray passes an actor's exception on as text: its class and message are a line of the traceback.
        refusal = re.search(rf"^\S*{ModelRefused.__name__}: (.*)$", str(error), re.MULTILINE)
        if refusal is None:
            raise
        raise ModelRefused(refusal[1]) from error
