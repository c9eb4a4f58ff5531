"""Timed runs on the cluster: one engine in an actor, and nothing of ours beside it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import ray
from ray.exceptions import RayTaskError

from actors.evaluation.sweep import EnginePool, model_refused
from cluster.storage import fetch_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.decoding import DecodingModel
from mbd_core.evaluation.sweep.plan import Sweep
from mbd_core.evaluation.sweep.timed_runs import TimedStage
from mbd_core.evaluation.sweep.timing import TimedCase
from mbd_core.serving.tokens.load import load_engine


class TimingActor:
    """`TimedStage` in an actor: `models` maps the names in the rows to what `fetch_model` takes."""

    def __init__(
        self, models: Mapping[str, str], engine: EngineConfig, *, tensor_parallel: int, concurrency: int
    ) -> None:
        def load(name: str, buffer_size: int) -> DecodingModel:
            config = replace(engine, buffer_size=buffer_size, max_rows=concurrency, prefix_caching=False)
            loaded = load_engine(model_folder(fetch_model(models[name])), config, tensor_parallel=tensor_parallel)
            loaded.prepare()
            return DecodingModel(loaded.engine, loaded.tokenizer)

        self._stage = TimedStage(load, concurrency=concurrency)

    def time(self, case: TimedCase, *, left_out: Collection[int] = ()) -> pa.Table:
        return self._stage(case, left_out=left_out)

    def close(self) -> None:
        self._stage.close()


def time_cases(
    cases: Sequence[TimedCase],
    sweep: Sweep,
    pool: EnginePool,
    *,
    concurrency: int,
    left_out: Collection[int] = (),
    urls: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, pa.Table]]:
    """Time one case after the other, without the samples `left_out`; their numbers and timed requests.

    Raises `ModelRefused` as `run_parts` does.
    """
    if not cases:
        return
    models = {name: (urls or {}).get(folder, folder) for name, folder in sweep.models.items()}
    resources = {"num_cpus": pool.topology.num_cpus, "num_gpus": pool.topology.num_gpus}
    actor = (
        ray.remote(TimingActor)
        .options(**resources, max_restarts=3, max_task_retries=3)
        .remote(models, pool.engine, tensor_parallel=pool.topology.ranks, concurrency=concurrency)
    )
    try:
        for case in cases:
            yield case.number, ray.get(actor.time.remote(case, left_out=left_out))
        ray.get(actor.close.remote())
    except RayTaskError as error:
        refusal = model_refused(error)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        ray.kill(actor)
