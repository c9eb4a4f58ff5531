"""Weights at a URL in the memory of ranks: downloaded once and then loaded, beside ranges that each rank reads itself.

A rank's share is what tensor parallelism gives it: rows of a matrix that is split by its outputs, columns of one that
is split by its inputs (`o_proj`, `down_proj`), and whole tensors else. Rows are one range of a file. Columns lie in
all of the matrix, so each rank reads it whole.
"""

import json
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.measuring import markdown
from jobs.command_line import JsonFile
from mbd_core.command_line import CommandText, command
from mbd_core.fields import DATA, MODEL, Flag, Ge
from mbd_core.files import check_new_file, write_json
from mbd_core.storage.download import CHUNK_BYTES, NUM_STREAMS
from mbd_core.storage.folder import Folder

COLUMNS = {
    "ranks": "ranks",
    "way": "way",
    "seconds": "s",
    "gigabytes": "GB from the URL",
    "loaded": "of them after the download (s)",
}
HEAD_BYTES = 8  # of a safetensors file: how long its JSON is
BY_INPUTS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor in a file, and where a rank's rows lie in them."""

    file: str
    name: str
    start: int
    end: int
    num_rows: int

    def wanted(self, rank: int, ranks: int) -> tuple[int, int]:
        """The range that holds a rank's share."""
        if self.num_rows % ranks or self.name.endswith(BY_INPUTS):
            return self.start, self.end
        length = (self.end - self.start) // ranks
        return self.start + rank * length, self.start + (rank + 1) * length


def stored_tensors(folder: Folder) -> list[Stored]:
    """The tensors of all safetensors files, by the heads of the files; a vector counts as one row."""
    system, path = folder.filesystem()
    found = []
    for file in sorted(str(name).rpartition("/")[2] for name in system.ls(path, detail=False)):
        if file.endswith(".safetensors"):
            (length,) = struct.unpack("<Q", system.cat_file(f"{path}/{file}", start=0, end=HEAD_BYTES))
            head = json.loads(system.cat_file(f"{path}/{file}", start=HEAD_BYTES, end=HEAD_BYTES + length))
            for name, tensor in head.items():
                if name != "__metadata__":
                    start, end = (HEAD_BYTES + length + offset for offset in tensor["data_offsets"])
                    rows = tensor["shape"][0] if len(tensor["shape"]) > 1 else 1
                    found.append(Stored(file, name, start, end, rows))
    return found


def read_ranges(url: str, tensors: list[Stored], rank: int, ranks: int) -> int:
    """A rank reads its share from the URL into memory. Returns the bytes that came."""
    system, path = Folder.at(url).filesystem()
    memory = [np.empty(end - start, np.uint8) for start, end in (each.wanted(rank, ranks) for each in tensors)]

    def read(number: int, start: int, end: int) -> None:
        first = tensors[number].wanted(rank, ranks)[0]
        content = system.cat_file(f"{path}/{tensors[number].file}", start=start, end=end)
        memory[number][start - first : end - first] = np.frombuffer(content, np.uint8)

    with ThreadPoolExecutor(NUM_STREAMS) as streams:
        pieces = [
            (number, start, min(start + CHUNK_BYTES, end))
            for number, (first, end) in enumerate(each.wanted(rank, ranks) for each in tensors)
            for start in range(first, end, CHUNK_BYTES)
        ]
        for done in [streams.submit(read, *piece) for piece in pieces]:
            done.result()
    return sum(array.size for array in memory)


def load_share(folder: str, tensors: list[Stored], rank: int, ranks: int) -> int:
    """A rank copies its share of a local folder into memory."""
    maps = {file: np.memmap(Path(folder) / file, np.uint8, "r") for file in {each.file for each in tensors}}
    shares = [maps[each.file][slice(*each.wanted(rank, ranks))].copy() for each in tensors]
    return sum(share.size for share in shares)


def measured(url: str, ranks: int, place: Path) -> Iterator[dict[str, Any]]:
    """Both ways by so many processes; the download goes below `place`."""
    folder, context = Folder.at(url), get_context("spawn")
    tensors = stored_tensors(folder)
    with ProcessPoolExecutor(ranks, mp_context=context) as processes:
        for done in [processes.submit(time.sleep, 1) for _ in range(ranks)]:  # each has started and imported
            done.result()
        start = time.monotonic()
        local = str(folder.fetch(place / f"cache-{ranks}"))
        fetched = time.monotonic()
        for share in [processes.submit(load_share, local, tensors, rank, ranks) for rank in range(ranks)]:
            share.result()
        end = time.monotonic()
        size = sum(file.stat().st_size for file in Path(local).iterdir())
        yield _row(ranks, "download, then load", end - start, size) | {"loaded": round(end - fetched, 1)}
        shutil.rmtree(place / f"cache-{ranks}", ignore_errors=True)  # a folder of this machine has no copy
        start = time.monotonic()
        shares = [processes.submit(read_ranges, url, tensors, rank, ranks) for rank in range(ranks)]
        size = sum(share.result() for share in shares)
        yield _row(ranks, "ranges", time.monotonic() - start, size)


def _row(ranks: int, way: str, seconds: float, size: int) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "way": way,
        "seconds": round(seconds, 1),
        "gigabytes": round(size / 1e9, 2),
        "loaded": None,
    }


def run_remote(
    command_line: CommandText,
    *,
    model: Annotated[str, Flag("URL of a model folder with safetensors.", MODEL, metavar="URL")],
    ranks: Annotated[tuple[int, ...], Flag("Processes of a machine that want the weights.", DATA, commas=True)] = (
        1,
        2,
    ),
    times: Annotated[int, Ge(1), Flag("Runs of both ways.", DATA)] = 1,
    json: JsonFile = None,
) -> None:
    """Weights at a URL in the memory of ranks: downloaded once and then loaded, or read by ranges."""
    if json is not None:
        check_new_file(json)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mbd-remote-") as place:
        for number in ranks:
            for _ in range(times):
                rows += measured(model, number, Path(place))
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "rows": rows})
    print(markdown(rows, COLUMNS))


remote = command(run_remote, "python -m benchmarks remote")
