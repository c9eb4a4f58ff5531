"""GGUF files as model folders: weights, configuration, tokenizer and chat template, by transformers' own reader.

The folder is written once. Weights that are all float32, or all float16, keep their dtype; other weights become
bfloat16.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.safetensor_files import ShardWriter
from mbd_core.checkpoint.saving import MODEL_KIND, check_room
from mbd_core.files import check_target_folder, folder_beside, write_json
from mbd_core.storage.cache import FolderCache

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # of `general.architecture`; a Mistral says llama, and is read as a Llama
SUFFIX = ".gguf"


def find_gguf(model: Path) -> Path | None:
    """The file `model` itself if it is a GGUF, or the GGUF of a folder without safetensors; else `None`.

    Raises `ValueError` for a folder with several GGUF files.
    """
    if model.suffix == SUFFIX and model.is_file():
        return model
    if not model.is_dir() or any(model.glob("*.safetensors")):
        return None
    files = sorted(model.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ValueError(f"{model} holds several GGUF files; name one of them: {', '.join(f.name for f in files)}")
    return files[0] if files else None


def folder_of_gguf(file: Path) -> Path:
    """The model folder of a GGUF file, in the user's cache; it is written when it is first asked for.

    Raises `ValueError` as `write_gguf_folder` does.
    """
    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    return FolderCache.of_user().filled(f"gguf-{key}", file.stem, partial(write_gguf_folder, file))


def write_gguf_folder(file: Path, target: Path, *, extra: Mapping[str, str] | None = None) -> None:
    """Writes the model of a GGUF file as the folder `target`; `extra` adds small text files (name -> content).

    Raises `ValueError` for a file that is damaged or of another architecture, for settings that transformers' reader
    drops (scaled rotary frequencies, a sliding window, experts), and for tensors that are missing, which it would
    invent, or that it would drop. No partial target remains.
    """
    import torch

    check_target_folder(target, MODEL_KIND)
    values, tensors, dtype = _check(file)
    architecture = values["general.architecture"]
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**place)
        if f"{architecture}.attention.key_length" in values:
            config.head_dim = values[f"{architecture}.attention.key_length"]
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(**place, config=config, dtype=dtype)
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{file}, a {architecture}, cannot be read by transformers: {text}") from None
    names = dict(model.named_parameters())  # a tied head is there once
    _check_tensors(file, architecture, tensors, names, config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if values.get(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{file} rotates a part of each head, which a GGUF's reader drops; take the model's safetensors"
        )
    check_room(target, sum(tensor.nbytes for tensor in names.values()))
    roles = ("bos_token_id", "eos_token_id", "pad_token_id")
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if key != "_model_name_or_path" and (key in roles or not key.endswith("_token_id"))
    }
    kept = {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    with folder_beside(target, MODEL_KIND) as new_folder:
        tokenizer.save_pretrained(new_folder)
        write_json(new_folder / "config.json", {**settings, **kept})
        ids = {key: settings[key] for key in roles if settings.get(key) is not None}
        write_json(new_folder / "generation_config.json", ids)
        writer = ShardWriter(new_folder)
        for name, tensor in names.items():
            writer.add(name, tensor.detach().to(torch.float32 if tensor.dtype == torch.float64 else tensor.dtype))
        writer.close()
        for name, text in (extra or {}).items():
            (new_folder / name).write_text(text)
        try:
            read_folder(new_folder)
        except ValueError as error:
            raise ValueError(f"{file} is no model that can be run here: {error}") from None


def _check_tensors(
    file: Path, architecture: str, tensors: set[str], parameters: Iterable[str], num_layers: int
) -> None:
    """Raises `ValueError` naming a tensor unless a file has exactly the tensors of a model's parameters."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    theirs = get_tensor_name_map(kind, num_layers)
    pairs = (name.rpartition(".") for name in parameters)
    wanted = {f"{theirs.get_name(module)}.{leaf}" for module, _, leaf in pairs}
    if wanted - tensors:
        raise ValueError(f"{file} lacks the tensor {min(wanted - tensors)}; download the whole model")
    if tensors - wanted:
        raise ValueError(
            f"{file} has the tensor {min(tensors - wanted)}, for which a {architecture} here has no place; take the "
            "model's safetensors"
        )


def _check(file: Path) -> tuple[dict[str, Any], set[str], Any]:
    """A GGUF file's settings without its tokenizer, its tensors' names, and the dtype of the weights to write."""
    import torch

    try:
        from gguf import GGMLQuantizationType, GGUFReader
    except ImportError:
        raise ValueError(f"{file} needs the package gguf (pip install 'mbd-cluster[gguf]')") from None
    try:
        reader = GGUFReader(file)
        values = {name: reader.fields[name].contents() for name in reader.fields if not name.startswith("tokenizer.")}
        kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
        names = {tensor.name for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError) as error:
        raise ValueError(f"{file} is damaged, cut short or no GGUF file: {' '.join(str(error).split())}") from None
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{file} is a GGUF of architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    if values.get("split.count", 1) > 1:
        raise ValueError(
            f"{file} is one of the {values['split.count']} parts of a model; join them first: llama-gguf-split --merge"
        )
    dropped = {
        "scaled rotary frequencies": values.get(f"{architecture}.rope.scaling.type", "none") != "none"
        or "rope_freqs.weight" in names,
        "a sliding window": bool(values.get(f"{architecture}.attention.sliding_window")),
        "experts": bool(values.get(f"{architecture}.expert_count")),
    }
    for what, is_there in dropped.items():
        if is_there:
            raise ValueError(f"{file} has {what}, which a GGUF does not carry whole; take the model's safetensors")
    kept = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    return values, names, kept.get(next(iter(kinds)), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16
