"""Converts an autoregressive model folder to block diffusion: the same weights, another architecture, a mask token.

The new folder decodes block by block; its texts make sense only after a training. Its config.json has the base's keys,
the names of the layout, and mask, block size and attention.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mbd_core.checkpoint.adaptation.mask_choice import MaskChoice, choose_mask, write_mask
from mbd_core.checkpoint.base_files import carried_config, carried_generation, files_beside_weights, read_configs
from mbd_core.checkpoint.config import write_config
from mbd_core.checkpoint.families import FAMILIES
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.model_family import DiffusionLayout
from mbd_core.checkpoint.safetensor_files import MAX_SHARD_BYTES, HfFolder, ShardWriter
from mbd_core.checkpoint.saving import MODEL_KIND, check_room
from mbd_core.files import check_target_folder, folder_beside, write_json
from mbd_core.models.model_config import ModelConfig

ARCHITECTURES: dict[DiffusionLayout, dict[str, str]] = {
    "a2d": {
        "LlamaForCausalLM": "A2DLlamaLMHeadModel",
        "MistralForCausalLM": "A2DLlamaLMHeadModel",  # without a window it is a Llama
        "Qwen2ForCausalLM": "A2DQwen2LMHeadModel",
        "Qwen3ForCausalLM": "A2DQwen3LMHeadModel",
    },
    "sdar": {"Qwen3ForCausalLM": "SDARForCausalLM", "Qwen3MoeForCausalLM": "SDARMoeForCausalLM"},
    "fast-dllm-v2": {"Qwen2ForCausalLM": "Fast_dLLM_QwenForCausalLM"},
}
BLOCK_SIZE = 32
VOCABULARY_STEP = 64  # a vocabulary that grows stays divisible among tensor-parallel ranks
OF_THE_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionPlan:
    """The model that a conversion writes, and its mask."""

    config: ModelConfig
    mask: MaskChoice


def plan_block_diffusion(
    base: ModelFolder, *, layout: DiffusionLayout = "a2d", block_size: int = BLOCK_SIZE, mask_token: str | None = None
) -> BlockDiffusionPlan:
    """The block-diffusion model of a base. Raises `ValueError` for a base without this layout, and as `choose_mask`
    does."""
    config = base.config
    if not is_autoregressive(config):
        raise ValueError(
            f"{base.path} is a {config.architecture}, which decodes in blocks already; convert an autoregressive model"
        )
    if block_size < 1:
        raise ValueError(f"--block-size {block_size} must be at least 1")
    if block_size > config.max_positions:
        raise ValueError(f"--block-size {block_size} is more than the {config.max_positions} positions of {base.path}")
    layouts = layouts_of(config)
    if layout not in layouts:
        remedy = f"give --layout {layouts[0]}" if layouts else "take a Llama, Qwen2 or Qwen3"
        raise ValueError(f"{base.path} is a {config.architecture}, which has no layout {layout}; {remedy}")
    mask = choose_mask(base.tokenizer, config.eos_token_ids, mask_token)
    needed = mask.token_id + 1
    grown = math.ceil(needed / VOCABULARY_STEP) * VOCABULARY_STEP
    architecture = ARCHITECTURES[layout][config.architecture]
    config = replace(
        config,
        architecture=architecture,
        shift_logits=FAMILIES[architecture].switches.get("shift_logits", False),
        attention="block_causal",
        mask_token_id=mask.token_id,
        block_size=block_size,
        vocab_size=config.vocab_size if needed <= config.vocab_size else grown,
    )
    return BlockDiffusionPlan(config=config, mask=mask)


def is_autoregressive(config: ModelConfig) -> bool:
    """Whether the model decodes token by token and in no other way."""
    return config.prefix_methods == ("ar",)


def layouts_of(config: ModelConfig) -> list[DiffusionLayout]:
    """The layouts in which a base can be written."""
    return [layout for layout, targets in ARCHITECTURES.items() if config.architecture in targets]


def convert_to_block_diffusion(
    source: Path,
    target: Path,
    *,
    layout: DiffusionLayout = "a2d",
    block_size: int = BLOCK_SIZE,
    mask_token: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda bytes_written, total: None,
) -> BlockDiffusionPlan:
    """Writes the block-diffusion folder `target` of the autoregressive folder `source`, and returns its plan.

    Weights keep their values and dtypes. A vocabulary without room for the mask grows by rows that are the mean of the
    base's rows. The other files are copied, and the tokenizer's files get the mask.

    `progress` is called with the bytes read and the total. Raises `ValueError` as `read_folder`,
    `plan_block_diffusion` and `save_model` do. No partial target remains.
    """
    base = read_folder(source)
    plan = plan_block_diffusion(base, layout=layout, block_size=block_size, mask_token=mask_token)
    check_target_folder(target, MODEL_KIND, overwrite=overwrite)
    if target.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(target.resolve()):
        raise ValueError(f"{target} and {source} lie in each other; give a folder elsewhere")
    weights, configs = HfFolder(source), read_configs(source)
    total, bytes_written = sum(info.num_bytes for info in weights.tensors.values()), 0
    check_room(target, total)
    recommended = {
        "eos_token_id": list(plan.config.eos_token_ids),
        "mask_token_id": plan.mask.token_id,
        "block_size": block_size,
        "buffer_size": 1,
        **_decoding(plan.config),
    }
    dtype = str(base.stored_dtype).removeprefix("torch.")
    config = carried_config(configs.config, write_config(plan.config), dtype)
    # drop the base's code, and transformers 5's other spellings of keys that are written
    for key in ("auto_map", *FAMILIES[base.config.architecture].spellings):
        config.pop(key, None)
    with folder_beside(target, MODEL_KIND, overwrite=overwrite) as new_folder:
        for name, path in files_beside_weights(source).items():
            (new_folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new_folder / name)
        write_json(new_folder / "config.json", config)
        write_json(new_folder / "generation_config.json", carried_generation(configs.generation, recommended))
        write_mask(new_folder, plan.mask)
        writer = ShardWriter(new_folder, max_bytes=max_shard_bytes)
        for name in weights.tensors:
            tensor = weights.read(name)
            writer.add(name, _grown(tensor, plan.config.vocab_size) if name in OF_THE_VOCABULARY else tensor)
            bytes_written += tensor.nbytes
            progress(bytes_written, total)
        writer.close()
        read_folder(new_folder)
    return plan


def _decoding(config: ModelConfig) -> dict[str, Any]:
    """The family's own decoding, in sub-blocks that divide a block."""
    decoding = dict(FAMILIES[config.architecture].decoding)
    if "sub_block" in decoding:
        decoding["sub_block"] = math.gcd(decoding["sub_block"], config.block_size)
    return decoding


def _grown(rows: Tensor, num_rows: int) -> Tensor:
    """A matrix with rows for every token; new rows are the mean of the given rows."""
    missing = num_rows - len(rows)
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.float().mean(0, keepdim=True).to(rows.dtype).expand(missing, -1)])
