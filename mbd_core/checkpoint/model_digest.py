"""A digest of a model folder: sweeps and trainings use it to check that they continue with the same model."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from mbd_core.checkpoint.config import load_config
from mbd_core.files import MANIFEST
from mbd_core.storage.download import NUM_STREAMS
from mbd_core.storage.streamed import STUB, RangeReader, StreamedFile

WHOLE_BYTES = 8 * 2**20  # a file of at most this size is read whole
NUM_PROBES, PROBE_BYTES = 64, 64 * 2**10  # of a larger file, evenly spread
NOT_HASHED = (MANIFEST, "generation_config.json")  # recommendations do not change the model


def model_digest(folder: Path) -> str:
    """A hash of the names, sizes and contents of the files, without Markdown and hidden files. Large files are hashed
    at 64 places, because training changes all places.

    Of `generation_config.json` only the EOS ids and the mask id count, which it decides together with `config.json`. A
    file that stays at its URL counts as if it lay in the folder. Raises `ValueError` if the two files contradict each
    other, or a URL cannot be read.
    """
    config = load_config(folder)
    digest = hashlib.sha256(f"{sorted(config.eos_token_ids)} {config.mask_token_id}\n".encode())
    files = [p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]
    for file in sorted(files, key=_name):
        if _name(file) in NOT_HASHED or file.suffix == ".md":
            continue
        streamed = StreamedFile.at(file.with_name(_name(file))) if file.name.endswith(STUB) else None
        size = file.stat().st_size if streamed is None else streamed.size
        digest.update(f"{_name(file)} {size}\n".encode())
        for content in _read(file, places(size)) if streamed is None else _read_at_url(streamed, places(size)):
            digest.update(content)
    return digest.hexdigest()[:16]


def _name(file: Path) -> str:
    """The file's name; for a stub, the name of the file at the URL."""
    return file.name.removesuffix(STUB)


def places(size: int) -> list[range]:
    """The ranges of bytes that are hashed of a file of `size` bytes."""
    if size <= WHOLE_BYTES:
        return [range(size)]
    starts = (number * (size - PROBE_BYTES) // (NUM_PROBES - 1) for number in range(NUM_PROBES))
    return [range(start, start + PROBE_BYTES) for start in starts]


def _read(file: Path, parts: list[range]) -> Iterator[bytes]:
    with file.open("rb") as content:
        for part in parts:
            content.seek(part.start)
            yield content.read(len(part))


def _read_at_url(file: StreamedFile, parts: list[range]) -> Iterator[bytes]:
    with closing(RangeReader(file)) as reader, ThreadPoolExecutor(NUM_STREAMS) as threads:

        def read(part: range) -> bytes:
            content = np.empty(len(part), np.uint8)
            reader.read_into(content, part.start - file.begin)
            return content.tobytes()

        yield from threads.map(read, parts)
        reader.check_unchanged()
