"""A sweep on Ray Data: a pool of actors that decode, then tasks that grade, over tables of samples."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayTaskError

from cluster.storage import fetch_model
from cluster.topology import Topology, plan_topology
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.evaluation.decode_stage import DecodeStage, DecodingModel, ModelRefused
from mbd_core.evaluation.endpoint_stage import EndpointLost, EndpointStage
from mbd_core.evaluation.grade_stage import grade_table
from mbd_core.evaluation.sweep_parts import Part
from mbd_core.evaluation.sweep_plan import Sweep
from mbd_core.serving.load import load_engine


class DecodeActor:
    """`DecodeStage` in an actor: `models` maps the names in the rows to what `fetch_model` takes.

    It is called with a packed part, so that Ray Data neither joins parts nor splits one.
    """

    def __init__(self, models: Mapping[str, str], engine: EngineConfig, *, tensor_parallel: int = 1) -> None:
        def load(name: str) -> DecodingModel:
            loaded = load_engine(model_folder(fetch_model(models[name])), engine, tensor_parallel=tensor_parallel)
            loaded.prepare()
            return DecodingModel(loaded.engine, loaded.tokenizer)

        self._stage = DecodeStage(load)

    def __call__(self, packed: pa.Table) -> pa.Table:
        number, planned = unpack(packed)
        return pack(number, self.decode(planned))

    def decode(self, table: pa.Table) -> pa.Table:
        return self._stage(table)

    def close(self) -> None:
        self._stage.close()


def grade_part(packed: pa.Table) -> pa.Table:
    """`grade_table` on a packed part."""
    number, decoded = unpack(packed)
    return pack(number, grade_table(decoded))


def pack(number: int, table: pa.Table) -> pa.Table:
    """A part in one row: its number, and its table in Arrow's format for streams."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    columns = {"part": pa.array([number]), "table": pa.array([sink.getvalue().to_pybytes()], pa.large_binary())}
    return pa.table(columns)


def unpack(packed: pa.Table) -> tuple[int, pa.Table]:
    """The number and the table of a packed part."""
    (row,) = packed.to_pylist()
    return row["part"], pa.ipc.open_stream(row["table"]).read_all()


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


def run_parts(
    parts: Sequence[Part], sweep: Sweep, pool: EnginePool, *, urls: Mapping[str, str] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Decode and grade parts on the connected cluster; their numbers and graded samples as they come, in no
    particular order.

    `urls` maps the folders of models that were fetched to where they come from: each node fetches them for itself.
    Raises `ModelRefused` if an actor cannot load a model, which only its machine can find out.
    """
    if not parts:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False  # `collect_samples` shows one for the whole sweep
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    models = {name: (urls or {}).get(folder, folder) for name, folder in sweep.models.items()}
    engines = pool.topology
    graded = (
        ray.data.from_arrow([pack(part.number, part.table()) for part in parts])
        .map_batches(
            DecodeActor,
            fn_constructor_kwargs={"models": models, "engine": pool.engine, "tensor_parallel": engines.ranks},
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=engines.processes),
            num_cpus=engines.num_cpus,
            num_gpus=engines.num_gpus,
        )
        .map_batches(grade_part, batch_size=1, batch_format="pyarrow", num_cpus=1)
    )
    try:
        for packed in graded.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0):
            yield unpack(packed)
    except RayTaskError as error:
        refusal = model_refused(error)
        if refusal is None:
            raise
        raise refusal from error


def compute_parts(
    parts: Sequence[Part],
    sweep: Sweep,
    pool: EnginePool,
    *,
    stage: EndpointStage,
    urls: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, pa.Table]]:
    """The graded samples of parts with their numbers: `run_parts` for models, then `ask_parts` for endpoints."""
    yield from run_parts([part for part in parts if part.model in sweep.models], sweep, pool, urls=urls)
    yield from ask_parts([part for part in parts if part.model in sweep.endpoints], stage)


def ask_parts(parts: Sequence[Part], stage: EndpointStage) -> Iterator[tuple[int, pa.Table]]:
    """Ask endpoints for parts, from this process, which alone has their keys; each is graded on the cluster while the
    next one is asked. Their numbers and graded samples as they come.

    Raises `EndpointLost`, after what was asked before has come.
    """
    grade = ray.remote(num_cpus=1)(grade_part)
    graded: list[Any] = []
    lost = None
    for part in parts:
        try:
            graded.append(grade.remote(pack(part.number, stage(part.table()))))
        except EndpointLost as error:
            lost = error
            break
        done, graded = ray.wait(graded, num_returns=len(graded), timeout=0)
        yield from (unpack(ray.get(one)) for one in done)
    yield from (unpack(ray.get(one)) for one in graded)
    if lost is not None:
        raise lost


def model_refused(error: RayTaskError) -> ModelRefused | None:
    """The `ModelRefused` that an actor raised. Ray passes it on as text: its class and message are a line of it."""
    refusal = re.search(rf"^\S*{ModelRefused.__name__}: (.*)$", str(error), re.MULTILINE)
    return None if refusal is None else ModelRefused(refusal[1])
