"""A sweep on Ray Data: a pool of actors that decode, then tasks that grade, over tables of samples."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from actors.evaluation.graded_parts import grade_isolated_part, grade_part, pack, unpack
from cluster.storage import fetch_model
from cluster.topology import Topology, plan_topology
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.decoding import DecodeStage, DecodingModel, ModelRefused
from mbd_core.evaluation.sweep.endpoint_stage import EndpointLost, EndpointStage
from mbd_core.evaluation.sweep.parts import Part
from mbd_core.evaluation.sweep.plan import Sweep
from mbd_core.evaluation.sweep.samples import NOTHING, Attempts, DeathWatch, DividedParts
from mbd_core.serving.tokens.load import load_engine


class DecodeActor:
    """`DecodeStage` in an actor: `models` maps the names in the rows to what `fetch_model` takes.

    It is called with a packed part, so that Ray Data neither joins parts nor splits one. Ray starts it anew when its
    process dies, and repeats the call: `attempts`, an actor of `Attempts`, says when not to try again.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        engine: EngineConfig,
        *,
        tensor_parallel: int = 1,
        attempts: "ActorHandle[Attempts] | None" = None,
    ) -> None:
        def load(name: str) -> DecodingModel:
            loaded = load_engine(model_folder(fetch_model(models[name])), engine, tensor_parallel=tensor_parallel)
            loaded.prepare()
            return DecodingModel(loaded.engine, loaded.tokenizer)

        self._stage, self._attempts = DecodeStage(load), attempts

    def __call__(self, packed: pa.Table) -> pa.Table:
        """The decoded part, or none of its rows if a process died of it too often."""
        assert self._attempts is not None
        number, planned = unpack(packed)
        if not ray.get(self._attempts.begin.remote(number)):
            return pack(number, NOTHING)
        decoded = self.decode(planned)
        ray.get(self._attempts.end.remote(number))
        return pack(number, decoded)

    def decode(self, table: pa.Table) -> pa.Table:
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


def run_parts(
    parts: Sequence[Part],
    sweep: Sweep,
    pool: EnginePool,
    *,
    urls: Mapping[str, str] | None = None,
    decoding: Collection[str] = (),
    isolated: bool = False,
) -> Iterator[tuple[int, pa.Table]]:
    """Decode and grade parts on the connected cluster; their numbers and graded samples as they come, in no
    particular order.

    `urls` maps the folders of models that were fetched to where they come from: each node fetches them for itself.
    `decoding` are the models that are known to decode. Raises `ModelRefused` if an actor cannot load a model, which
    only its machine can find out, and `ModelDies`.
    """
    if not parts:
        return
    models = {name: (urls or {}).get(folder, folder) for name, folder in sweep.models.items()}
    by_number, aside, watch = {part.number: part for part in parts}, list[Part](), DeathWatch(decoding)
    try:
        for number, graded in _decode_and_grade(
            [(part.number, part.table()) for part in parts], models, pool, isolated=isolated
        ):
            part = by_number[number]
            if len(graded):
                watch.decoded(part.model)
                yield number, graded
            else:
                watch.lost(part.model, f"part {number}")
                aside.append(part)
        divided = DividedParts(sorted(aside, key=lambda part: part.number), DeathWatch(watch.decoding))
        for sample, graded in _decode_and_grade(divided.samples(), models, pool, isolated=isolated):
            yield from divided.add(sample, graded)
        divided.check_end()
    except RayTaskError as error:
        refusal = model_refused(error)
        if refusal is None:
            raise
        raise refusal from error


def _decode_and_grade(
    tables: Sequence[tuple[int, pa.Table]], models: Mapping[str, str], pool: EnginePool, *, isolated: bool
) -> Iterator[tuple[int, pa.Table]]:
    """Numbered tables, decoded and graded as they come; one of which processes died too often has no rows."""
    if not tables:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False  # `collect_samples` shows one for the whole sweep
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    engines = pool.topology
    attempts = ray.remote(Attempts).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    arguments = {"models": models, "engine": pool.engine, "tensor_parallel": engines.ranks, "attempts": attempts}
    graded = (
        ray.data.from_arrow([pack(number, table) for number, table in tables])
        .map_batches(
            DecodeActor,
            fn_constructor_kwargs=arguments,
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=engines.processes),
            num_cpus=engines.num_cpus,
            num_gpus=engines.num_gpus,
        )
        .map_batches(grade_isolated_part if isolated else grade_part, batch_size=1, batch_format="pyarrow", num_cpus=1)
    )
    for packed in graded.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0):
        yield unpack(packed)


def compute_parts(
    parts: Sequence[Part],
    missing: Collection[int],
    sweep: Sweep,
    pool: EnginePool,
    *,
    stage: EndpointStage,
    urls: Mapping[str, str] | None = None,
    isolated: bool = False,
) -> Iterator[tuple[int, pa.Table]]:
    """The graded samples of the parts whose numbers are missing: `run_parts` for models, then `ask_parts` for
    endpoints. A model decodes if a part of it is there. With `isolated`, a machine without bubblewrap and Landlock
    refuses to grade programs."""
    absent = [part for part in parts if part.number in missing]
    decoding = {part.model for part in parts if part.number not in missing}
    own = [part for part in absent if part.model in sweep.models]
    yield from run_parts(own, sweep, pool, urls=urls, decoding=decoding, isolated=isolated)
    yield from ask_parts([p for p in absent if p.model in sweep.endpoints], stage, isolated=isolated)


def ask_parts(
    parts: Sequence[Part], stage: EndpointStage, *, isolated: bool = False
) -> Iterator[tuple[int, pa.Table]]:
    """Ask endpoints for parts, from this process, which alone has their keys; each is graded on the cluster while the
    next one is asked. Their numbers and graded samples as they come.

    Raises `EndpointLost`, after what was asked before has come.
    """
    grade = ray.remote(num_cpus=1)(grade_isolated_part if isolated else grade_part)
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
