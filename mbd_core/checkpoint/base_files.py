"""The files and JSON fields that a trained or adapted model takes over from its base's folder.

A release's folder holds more than we read: the code that transformers runs for it (`auto_map`), its licence, files of
its tokenizer, settings of other engines. Users of the new folder need these files too. Entries that the new weights
make untrue are left out or written anew.
"""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mbd_core.checkpoint.config import load_generation_defaults
from mbd_core.checkpoint.families import family_of
from mbd_core.checkpoint.folder import METHOD_FIELDS
from mbd_core.checkpoint.safetensor_files import METADATA, HfFolder, read_json
from mbd_core.decoding.blocks.methods import KEY as SPEED_FRONT
from mbd_core.files import MANIFEST

# Weights in any format, and states of other trainers.
WEIGHTS_ENDINGS = (
    ".safetensors",
    ".distcp",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".npz",
    ".onnx",
    ".onnx_data",
    ".index.json",
    METADATA,
)
# Files that no folder of changed weights gets: an adapter beside the weights would be applied a second time.
NEVER_CARRIED = (MANIFEST, "adapter_config.json", "trainer_state.json")
# Settings of quantized weights; ours are not quantized.
QUANTIZATION_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
CHOSEN = "chosen_decoding"  # in generation_config.json, beside the decoding that `--write-best` chose
# In generation_config.json: the recommended decoding, and the record of the training. Other weights need other values.
OF_THE_WEIGHTS = METHOD_FIELDS | {CHOSEN, SPEED_FRONT, "trained_with", "ar_mode"}
MOST_BYTES = 2**29  # of the files beside the weights, which a training keeps in memory


@dataclass(frozen=True, kw_only=True)
class BaseFiles:
    """A base's config.json and generation_config.json, its other files by name, and its unused tensors
    (`ModelFamily.skipped`)."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    others: dict[str, bytes]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def write_others(self, folder: Path) -> None:
        """Writes the files that hold neither weights nor one of the two configurations."""
        for name, content in self.others.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read_base(folder: Path) -> BaseFiles:
    """Reads everything that a model trained from `folder` takes over, before the training, so that it is not lost
    during the training.

    Raises `ValueError` as `files_beside_weights` does, and for more than `MOST_BYTES`.
    """
    files, configs = files_beside_weights(folder), read_configs(folder)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"{folder} holds {sum(sizes.values()):,} bytes beside its weights, of which a trained model takes over at "
            f"most {MOST_BYTES:,}: move what is not the model's, such as {largest}, to another folder"
        )
    own = ("config.json", "generation_config.json")
    others = {name: path.read_bytes() for name, path in files.items() if name not in own}
    _, family = family_of(configs.config)
    weights = HfFolder(folder) if family.skipped else None
    skipped = [] if weights is None else [name for name in weights.tensors if name.startswith(family.skipped)]
    return replace(configs, others=others, tensors={name: weights.read(name) for name in skipped if weights})


def read_configs(folder: Path) -> BaseFiles:
    """A folder's two configurations, without its other files."""
    return BaseFiles(config=read_json(folder / "config.json"), generation=load_generation_defaults(folder), others={})


def files_beside_weights(folder: Path) -> dict[str, Path]:
    """The files of a model folder that a model made from it takes over, by name relative to the folder.

    All regular files are taken over, except weights, states of trainers, settings of quantized weights, and hidden
    files. A subfolder that holds weights or that the project wrote is another model's and is left out. In a snapshot
    of Hugging Face's cache every file is a link to one of the cache's blobs. Any other link out of the folder raises
    `ValueError`.
    """
    root = folder.resolve()
    inside = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    files: dict[str, Path] = {}
    for path in _walk(folder):
        is_inside = path.is_file() and any(path.resolve().is_relative_to(parent) for parent in inside)
        if path.is_symlink() and not is_inside:
            raise ValueError(f"{path} is a link to no file in {folder}, and is not copied; put the file itself there")
        if stat.S_ISREG(path.stat().st_mode):
            files[str(path.relative_to(folder))] = path
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Files and links below a folder, without other models' folders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or _is_never_carried(path.name):
            continue
        if not path.is_dir() or path.is_symlink():
            yield path
        elif not any(p.name.endswith(WEIGHTS_ENDINGS) or p.name == MANIFEST for p in path.rglob("*")):
            yield from _walk(path)


def _is_never_carried(name: str) -> bool:
    """Whether a file of this name belongs to weights or to a trainer, or is the manifest."""
    return name.endswith(WEIGHTS_ENDINGS) or name in (*NEVER_CARRIED, *QUANTIZATION_FILES) or ".tfevents." in name


def carried_config(base: Mapping[str, Any], written: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A base's config.json with the fields that we write, for unquantized weights of `dtype`.

    The padding id, the name of the dtype's key, and unwritten keys of a nested text model stay the base's. Sections of
    other modalities stay as they are.
    """
    section = family_of(written)[1].text
    if section is not None and isinstance(base.get(section), Mapping):
        text_dtype = dict.fromkeys({"torch_dtype", "dtype"} & base[section].keys(), dtype)
        written = {**written, section: {**base[section], **written[section], **text_dtype}}
    base_fields = {
        key: value for key, value in base.items() if key not in ("quantization_config", "dtype", "torch_dtype")
    }
    names = [name for name in ("torch_dtype", "dtype") if name in base] or ["dtype"]
    padding = {"pad_token_id": base["pad_token_id"]} if base.get("pad_token_id") is not None else {}
    return {**base_fields, **written, **padding, **dict.fromkeys(names, dtype)}


def carried_generation(base: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A base's generation_config.json with the fields that we write, without the fields of the base's own weights."""
    return {**{key: value for key, value in base.items() if key not in OF_THE_WEIGHTS}, **written}
