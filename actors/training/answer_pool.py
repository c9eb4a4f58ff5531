"""A pool of engines that answer a data set's rows; each part goes to a free actor."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.util import ActorPool

from actors.paths import JobPaths
from cluster.topology import plan_topology
from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.model_answers import Answering, AnswerRecord, PartDecoder, Parts
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.data.chats import Chat
from mbd_core.serving.tokens.load import load_engine


class AnswerActor:
    """A `PartDecoder` in an actor, which loads the model for its first part."""

    def __init__(self, model: str, answering: Answering, engine: EngineConfig, paths: JobPaths) -> None:
        def load() -> DecodingModel:
            loaded = load_engine(model_folder(paths.fetch(model)), engine)
            return DecodingModel(loaded.engine, loaded.tokenizer)

        self._decoder = PartDecoder(answering, load)

    def decode(self, number: int, chats: list[Chat]) -> tuple[int, list[AnswerRecord] | str]:
        """A part's number with its records, or with the engine's refusal as text, because Ray wraps an actor's
        errors."""
        try:
            return number, self._decoder.decode(number, chats)
        except ValueError as error:
            return number, str(error)


class AnswerPool:
    """Actors on the connected cluster. They start with the first call. Ray restarts a lost actor and repeats its part.

    Raises `ClusterTooSmall` if there is no room for all actors, and the `ValueError` of `PartDecoder`.
    """

    def __init__(
        self, model: str, answering: Answering, engine: EngineConfig, *, num_actors: int, paths: JobPaths
    ) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        topology = plan_topology(nodes, processes=num_actors)
        if topology.num_gpus == 0:  # actors on CPUs may share a machine's memory
            engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / num_actors)
        self._arguments = (model, answering, engine, paths)
        self._actor = ray.remote(AnswerActor).options(
            num_cpus=topology.num_cpus, num_gpus=topology.num_gpus, max_restarts=3, max_task_retries=3
        )
        self._num_actors = num_actors
        self._actors: list[Any] = []

    def __call__(self, parts: Parts) -> Iterator[tuple[int, list[AnswerRecord]]]:
        if not self._actors:
            self._actors = [self._actor.remote(*self._arguments) for _ in range(self._num_actors)]
        pool = ActorPool(self._actors)
        for number, records in pool.map_unordered(
            lambda actor, part: actor.decode.remote(part[0], list(part[1])), parts
        ):
            if isinstance(records, str):
                raise ValueError(records)
            yield number, records

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
