"""A digest of a model folder: sweeps and trainings check with it that they go on with the model they began with."""

import hashlib
from pathlib import Path

from mbd_core.checkpoint.config import load_config
from mbd_core.files import MANIFEST

WHOLE_BYTES = 8 * 2**20  # a file of at most this size is read whole
NUM_PROBES, PROBE_BYTES = 64, 64 * 2**10  # of a larger file, evenly spread
NOT_HASHED = (MANIFEST, "generation_config.json")  # recommendations do not change the model


def model_digest(folder: Path) -> str:
    """A hash of the files' names, sizes and contents; large files at 64 places, because training changes all places.

    Of `generation_config.json` only the EOS ids and the mask id count, which it decides together with `config.json`.
    Raises `ValueError` if the two files contradict each other.
    """
    config = load_config(folder)
    digest = hashlib.sha256(f"{sorted(config.eos_token_ids)} {config.mask_token_id}\n".encode())
    for file in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        if file.name in NOT_HASHED or file.suffix == ".md":
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= WHOLE_BYTES:
                digest.update(content.read())
                continue
            for number in range(NUM_PROBES):
                content.seek(number * (size - PROBE_BYTES) // (NUM_PROBES - 1))
                digest.update(content.read(PROBE_BYTES))
    return digest.hexdigest()[:16]
