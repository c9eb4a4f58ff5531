"""A model folder without its weights: its check, its digest, and what a folder that is made from it takes over."""

import hashlib
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.families import FAMILIES, default_method, family_of
from mbd_core.checkpoint.loading import refuse_dcp
from mbd_core.checkpoint.safetensor_files import METADATA, HfFolder, list_tensors, read_json
from mbd_core.checkpoint.tensors import match_tensors
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import KEY as SPEED_FRONT
from mbd_core.decoding.blocks.methods import read_front
from mbd_core.files import MANIFEST
from mbd_core.models.model_config import ModelConfig

# The check of a model folder before its weights are read: configuration, tensors, tokenizer, recommended decoding.

METHOD_FIELDS = {f.name for f in fields(DecodingConfig)} - {"block_size"}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A checkpoint folder whose files agree with each other; of the weights, only the headers were read.

    defaults      the content of `generation_config.json`, with a canvas if a full-attention model names no decoding
    stored_dtype  the dtype of most tensors
    """

    path: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    defaults: dict[str, Any]
    stored_dtype: torch.dtype


def read_folder(folder: Path) -> ModelFolder:
    """Check everything of a model folder that can be checked without reading weights.

    Raises `ValueError`, one sentence that names the file and, where there is one, the tensor: for an unknown
    architecture, a distributed checkpoint, a missing shard, a file that is cut short, a missing or unexpected tensor
    or shape, a tokenizer or ids that do not fit the model, and decoding that cannot be honoured.
    """
    refuse_dcp(folder)
    config = load_config(folder)
    tensors, _, _ = match_tensors(folder, config, list_tensors(folder))
    tokenizer = load_tokenizer(folder, config)
    defaults = with_method(load_generation_defaults(folder), config)
    try:
        block_size = defaults.get("block_size", config.block_size)
        decoding_config(defaults, {}, block_size=block_size)
        read_front(defaults, block_size=block_size)
    except ValueError as error:
        raise ValueError(f"{folder}: generation_config.json: {error}") from None
    dtypes = [info.dtype for info in tensors.values()]
    return ModelFolder(
        path=folder,
        config=config,
        tokenizer=tokenizer,
        defaults=defaults,
        stored_dtype=max(set(dtypes), key=dtypes.count),
    )


def with_method(defaults: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """A `generation_config.json` with a decoding method: its family's, with the release's settings of it, unless it
    says otherwise."""
    family = FAMILIES[config.architecture]
    if set(defaults) & METHOD_FIELDS:
        return dict(defaults)
    settings = {ours: _value_at(defaults, theirs) for theirs, ours in family.generation.items()}
    settings = {name: value for name, value in settings.items() if value is not None}
    method = default_method(config.architecture, config.attention)
    part = next(iter(method), "")
    return {**defaults, **method, **({part: {**method[part], **settings}} if settings else {})}


def _value_at(values: Any, path: str) -> Any:
    """The value at a dotted path of a JSON object, `None` if there is none."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def edit_note(name: str, defaults: Mapping[str, Any], decoding: DecodingConfig) -> str | None:
    """A warning if `decoding` edits (T2T) and the model's `generation_config.json` does not recommend it."""
    if decoding.t2t is None or defaults.get("t2t") is not None:
        return None
    return (
        f"{name}: decoding.t2t was asked for, but its generation_config.json names none: a model that was not trained "
        "to edit its own tokens may overwrite right ones"
    )


# A digest of a model folder, by which sweeps and trainings know that they go on with the model they began with.

WHOLE_BYTES = 8 * 2**20  # a file of at most this size is read whole
NUM_PROBES, PROBE_BYTES = 64, 64 * 2**10  # of a larger one, evenly spread
NOT_HASHED = (MANIFEST, "generation_config.json")  # what it recommends is not what it is


def model_digest(folder: Path) -> str:
    """A hash of the files' names, sizes and contents; large files at 64 places, for training changes all of them.

    Of `generation_config.json` only the ids count that it decides together with `config.json`: those that end an
    answer, and the mask's. Raises `ValueError` where the two contradict each other.
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


# What a folder made from a model takes over: files beside the weights, and JSON fields.
#
# A release's folder holds more than we read: the code that transformers runs for it (`auto_map`), its licence, files
# of its tokenizer, settings of other engines. Whoever loads the new folder needs them. What the new weights make
# untrue is left out or written anew.

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
# Of no folder whose weights were changed: an adapter beside them would be applied a second time.
NEVER_CARRIED = (MANIFEST, "adapter_config.json", "trainer_state.json")
# Settings of weights that are quantized, which ours are not.
QUANTIZATION_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
CHOSEN = "chosen_decoding"  # of generation_config.json, beside the decoding that `--write-best` chose
# Of generation_config.json: how this model is best decoded, and what trained it. Other weights ask for other values.
OF_THE_WEIGHTS = METHOD_FIELDS | {CHOSEN, SPEED_FRONT, "trained_with"}
MOST_BYTES = 2**29  # beside the weights; a training keeps them in memory


@dataclass(frozen=True, kw_only=True)
class BaseFiles:
    """A base's config.json and generation_config.json, the content of its other files by name, and its tensors that
    are not computed with (`Family.skipped`)."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    others: dict[str, bytes]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def write_others(self, folder: Path) -> None:
        """Write the files that hold neither weights nor one of the two configurations."""
        for name, content in self.others.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read_base(folder: Path) -> BaseFiles:
    """Read what a model that is trained from `folder` takes over, so that it is there when the training ends.

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

    They are all regular files but weights, states of trainers, settings of quantized weights, and what is hidden; a
    subfolder that holds weights, or that the project wrote, is another model's and is left out whole. In a snapshot of
    Hugging Face's cache every file is a link to a blob beside it; any other link out of the folder is a `ValueError`.
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
    """Files and links below a folder, without what is another's."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or _is_never_carried(path.name):
            continue
        if not path.is_dir() or path.is_symlink():
            yield path
        elif not any(p.name.endswith(WEIGHTS_ENDINGS) or p.name == MANIFEST for p in path.rglob("*")):
            yield from _walk(path)


def _is_never_carried(name: str) -> bool:
    """Whether a file of this name is of weights, of a trainer, or the manifest."""
    return name.endswith(WEIGHTS_ENDINGS) or name in (*NEVER_CARRIED, *QUANTIZATION_FILES) or ".tfevents." in name


def carried_config(base: Mapping[str, Any], written: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A base's config.json with the fields that we write, for unquantized weights of `dtype`.

    The padding id and the name of the key of the dtype stay the base's, and so do keys of a nested text model that we
    do not write. Sections of other modalities stay as they are.
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
    """A base's generation_config.json with the fields that we write, without those that were its weights' own."""
    return {**{key: value for key, value in base.items() if key not in OF_THE_WEIGHTS}, **written}
