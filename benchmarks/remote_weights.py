"""Weights at a URL in the memory of ranks: downloaded once and then loaded (`url_weights="cache"`), or read by range
(`"stream"`), by the code of the engines."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks.measuring import markdown
from jobs.command_line import JsonFile
from mbd_core.command_line import CommandText, command
from mbd_core.fields import DATA, MODEL, Flag, Ge
from mbd_core.files import check_new_file, write_json
from mbd_core.storage.folder import Folder
from mbd_core.storage.streamed import Bytes, RangeReader

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = {
    "ranks": "ranks",
    "way": "way",
    "seconds": "s",
    "gigabytes": "GB from the URL",
    "loaded": "of them after the download (s)",
}


class CountedReader:
    """Counts the bytes that all readers of this process get."""

    num_bytes = 0
    read_into = RangeReader.read_into

    @classmethod
    def start(cls) -> None:
        cls.num_bytes = 0
        RangeReader.read_into = cls._counted  # type: ignore[assignment, method-assign]

    @staticmethod
    def _counted(reader: RangeReader, content: Bytes, start: int) -> None:
        CountedReader.num_bytes += len(content)
        CountedReader.read_into(reader, content, start)


def load_part(folder: str, rank: int, ranks: int) -> int:
    """A rank loads its part of the model. Returns the bytes that came from the URL."""
    import torch

    from mbd_core.checkpoint.loading import load_model
    from mbd_core.models.shard import Shard

    torch.set_num_threads(1)
    CountedReader.start()
    load_model(Path(folder), shard=Shard(rank=rank, size=ranks), reduce=_alone)
    return CountedReader.num_bytes


def start_process() -> None:
    """Import the modules that `load_part` needs. It takes long, so each process gets one call."""
    import mbd_core.checkpoint.loading  # noqa: F401

    time.sleep(1)


def _alone(partial: "Tensor") -> "Tensor":
    """Stands in for the sum over ranks, because no forward is computed."""
    return partial


def measure_ways(url: str, ranks: int, place: Path) -> Iterator[dict[str, Any]]:
    """A row for each way in which `ranks` processes load the weights. Fetched files lie below `place`, for a while."""
    folder, context = Folder.at(url), get_context("spawn")
    with ProcessPoolExecutor(ranks, mp_context=context) as processes:
        for done in [processes.submit(start_process) for _ in range(ranks)]:
            done.result()

        def load(local: str) -> int:
            parts = [processes.submit(load_part, local, rank, ranks) for rank in range(ranks)]
            return sum(part.result() for part in parts)

        start = time.monotonic()
        local = str(folder.fetch(place / "cache"))
        fetched = time.monotonic()
        load(local)
        end = time.monotonic()
        size = sum(file.stat().st_size for file in Path(local).iterdir())
        yield _row(ranks, "cache", end - start, size) | {"loaded": round(end - fetched, 1)}
        shutil.rmtree(place / "cache")
        start = time.monotonic()
        size = load(str(folder.fetch(place / "cache", stubs=place / "stubs")))
        yield _row(ranks, "stream", time.monotonic() - start, size)
        shutil.rmtree(place / "stubs")


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
    ranks: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Processes of a machine that want the weights.", DATA, commas=True)
    ] = (1, 2),
    times: Annotated[int, Ge(1), Flag("Runs of both ways.", DATA)] = 1,
    json: JsonFile = None,
) -> None:
    """Weights at a URL in the memory of ranks: downloaded once and then loaded, or read by range."""
    if not Folder.at(model).is_remote:
        raise ValueError(f"--model {model} is no URL: weights that lie here are not downloaded; give one as s3://...")
    if json is not None:
        check_new_file(json)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mbd-remote-") as place:
        for number in ranks:
            for _ in range(times):
                rows += measure_ways(model, number, Path(place))
    print(markdown(rows, COLUMNS))
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "rows": rows})


remote = command(run_remote, "python -m benchmarks remote")
