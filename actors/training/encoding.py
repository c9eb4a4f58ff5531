"""Ray Data's tasks tokenise conversations and keep their order: the samples equal those of one process."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
import ray.data

from actors.paths import NO_PATHS, JobPaths
from cluster.topology import plan_topology
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.multitf.data.chats import Chat
from mbd_core.multitf.data.encoding import EncodedChat, EncodedRow
from mbd_core.multitf.data.preparation import EncodeChats, encoder

WINDOW = 64
"""The number of chunks on the cluster at once. Their tokens come back in the order of the rows."""


def encode_on_cluster(
    model: str,
    *,
    num_workers: int,
    every: bool = False,
    max_length: int | None = None,
    paths: JobPaths = NO_PATHS,
) -> EncodeChats:
    """A function that tokenises for a model, in at most `num_workers` tasks at once. Each node finds the model itself.

    `every` and `max_length` mean the same as in `encode_rows`. Raises `ClusterTooSmall` if the connected cluster has
    no room for the tasks.
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
                fn_kwargs={"paths": paths},
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


def encode_batch(batch: pa.Table, *, paths: JobPaths = NO_PATHS) -> pa.Table:
    """Encode a chunk of conversations."""
    (row,) = batch.to_pylist()
    encode = encoder(folder_of(row["model"], paths), **json.loads(row["settings"]))
    (encoded,) = encode([[Chat(*chat) for chat in json.loads(row["chats"])]])
    return pa.table(
        {"number": [row["number"]], "rows": [json.dumps([asdict(conversation) for conversation in encoded])]}
    )


def unpacked(row: dict[str, Any]) -> list[EncodedRow]:
    """The encoded rows in a row that `encode_batch` gave."""
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
def folder_of(model: str, paths: JobPaths) -> ModelFolder:
    """The model's folder on this node, read once in each process."""
    return read_folder(model_folder(paths.fetch(model)))
