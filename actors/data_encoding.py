"""Conversations tokenised by tasks of Ray Data, in their order: the same samples as in one process."""

import json
import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
import ray.data

from cluster.storage import fetch_model
from cluster.topology import plan_topology
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.multitf.chat_encoding import EncodedChat
from mbd_core.multitf.data_preparation import Chat, Encode, encoder

WINDOW = 64
"""So many chunks are on the cluster at once; their tokens come back in the order of the rows."""


def encode_on_cluster(model: str, *, num_workers: int) -> Encode:
    """Tokenise for a model, which each node fetches for itself, by at most `num_workers` tasks at once.

    Raises `ClusterTooSmall` if the connected cluster has no room for them. A row that cannot be tokenised is a
    `ValueError`, as `encode_chats` says it.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    plan_topology(nodes, processes=num_workers, device="cpu", noun="workers")
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def encode(chunks: Iterable[list[Chat]]) -> Iterator[list[EncodedChat]]:
        left = iter(chunks)
        while window := list(islice(left, WINDOW)):
            tables = [
                pa.table({"number": [number], "model": [model], "chats": [json.dumps(chunk)]})
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
    """A chunk of conversations to its samples, or to what is wrong with it."""
    (row,) = batch.to_pylist()
    samples, error = "[]", ""
    try:
        (encoded,) = encoder(folder_of(row["model"]))([[(name, turns) for name, turns in json.loads(row["chats"])]])
        samples = json.dumps([[sample.prompt, sample.response] for sample in encoded])
    except ValueError as found:  # it crosses as text, since Ray wraps what a task raises
        error = str(found)
    return pa.table({"number": [row["number"]], "samples": [samples], "error": [error]})


def unpacked(row: dict[str, Any]) -> list[EncodedChat]:
    """The samples of a row of `encode_batch`; its error is raised as a `ValueError`."""
    if row["error"]:
        raise ValueError(row["error"])
    return [EncodedChat(prompt, response) for prompt, response in json.loads(row["samples"])]


@lru_cache(maxsize=1)
def folder_of(model: str) -> ModelFolder:
    """The model's folder on this node, read once in each process."""
    return read_folder(model_folder(fetch_model(model)))
