"""Training data made on the cluster: conversations tokenised by Ray Data, and answered by a pool of engines."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.util import ActorPool

from cluster.topology import plan_topology
from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.model_answers import Answering, Line, PartDecoder, Parts
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.data.chats import Chat
from mbd_core.multitf.data.encoding import EncodedChat, EncodedRow
from mbd_core.multitf.data.preparation import Encode, encoder
from mbd_core.serving.tokens.load import load_engine
from mbd_core.storage.models import fetch_model

# Conversations tokenised by tasks of Ray Data, in their order: the same samples as in one process.

WINDOW = 64
"""So many chunks are on the cluster at once; their tokens come back in the order of the rows."""


def encode_on_cluster(model: str, *, num_workers: int, every: bool = False, max_length: int | None = None) -> Encode:
    """Tokenise for a model, which each node fetches for itself, by at most `num_workers` tasks at once.

    Raises `ClusterTooSmall` if the connected cluster has no room for them. `every` and `max_length`: as `encode_rows`
    has them.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    plan_topology(nodes, processes=num_workers, device="cpu", noun="workers")
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    settings = json.dumps({"every": every, "max_length": max_length})

    def encode(chunks: Iterable[list[Chat]]) -> Iterator[list[EncodedRow]]:
        chunks_left = iter(chunks)
        while window := list(islice(chunks_left, WINDOW)):
            tables = [
                pa.table({"number": [number], "model": [model], "settings": [settings], "chats": [json.dumps(chunk)]})
                for number, chunk in enumerate(window)
            ]
            encoded = ray.data.from_arrow(tables).map_batches(
                encode_batch,
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=1,
                compute=ray.data.TaskPoolStrategy(size=num_workers),
            )
            rows = sorted(encoded.take_all(), key=lambda row: row["number"])
            assert len(rows) == len(window)
            for row in rows:
                yield unpacked(row)

    return encode


def encode_batch(batch: pa.Table) -> pa.Table:
    """A chunk of conversations to its encoded rows."""
    (row,) = batch.to_pylist()
    encode = encoder(folder_of(row["model"]), **json.loads(row["settings"]))
    (encoded,) = encode([[Chat(*chat) for chat in json.loads(row["chats"])]])
    return pa.table(
        {"number": [row["number"]], "rows": [json.dumps([asdict(conversation) for conversation in encoded])]}
    )


def unpacked(row: dict[str, Any]) -> list[EncodedRow]:
    """The encoded rows of a row of `encode_batch`."""
    return [
        EncodedRow(
            tuple(
                EncodedChat(sample["prompt"], sample["response"], tuple((a, b) for a, b in sample["earlier"]))
                for sample in conversation["samples"]
            ),
            conversation["is_too_long"],
            conversation["error"],
        )
        for conversation in json.loads(row["rows"])
    ]


@lru_cache(maxsize=1)
def folder_of(model: str) -> ModelFolder:
    """The model's folder on this node, read once in each process."""
    return read_folder(model_folder(fetch_model(model)))


# A pool of engines that answer a data set's rows: parts go to whichever actor is free.


class AnswerActor:
    """A `PartDecoder` in an actor, which loads the model for its first part."""

    def __init__(self, model: str, answering: Answering, engine: EngineConfig) -> None:
        def load() -> DecodingModel:
            loaded = load_engine(model_folder(fetch_model(model)), engine)
            return DecodingModel(loaded.engine, loaded.tokenizer)

        self._decoder = PartDecoder(answering, load)

    def decode(self, number: int, chats: list[Chat]) -> tuple[int, list[Line] | str]:
        """A part's number with its lines, or with why the engine refuses it: Ray wraps what an actor raises."""
        try:
            return number, self._decoder.decode(number, chats)
        except ValueError as error:
            return number, str(error)


class AnswerPool:
    """Actors on the connected cluster. They start with the first parts; one that is lost starts again, and so does its
    part.

    Raises `ClusterTooSmall` if not all find room, and a `ValueError` as `PartDecoder` does.
    """

    def __init__(self, model: str, answering: Answering, engine: EngineConfig, *, num_actors: int) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        topology = plan_topology(nodes, processes=num_actors)
        if topology.num_gpus == 0:  # actors on CPUs may share a machine's memory
            engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / num_actors)
        self._arguments = (model, answering, engine)
        self._actor = ray.remote(AnswerActor).options(
            num_cpus=topology.num_cpus, num_gpus=topology.num_gpus, max_restarts=3, max_task_retries=3
        )
        self._num_actors = num_actors
        self._actors: list[Any] = []

    def __call__(self, parts: Parts) -> Iterator[tuple[int, list[Line]]]:
        if not self._actors:
            self._actors = [self._actor.remote(*self._arguments) for _ in range(self._num_actors)]
        pool = ActorPool(self._actors)
        for number, lines in pool.map_unordered(
            lambda actor, part: actor.decode.remote(part[0], list(part[1])), parts
        ):
            if isinstance(lines, str):
                raise ValueError(lines)
            yield number, lines

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
