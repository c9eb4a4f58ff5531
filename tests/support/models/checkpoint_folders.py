"""Small model folders with known weights, in bfloat16 and in FP8 with a scale for each block, and their bytes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mbd_core.checkpoint.safetensor_files import INDEX, WEIGHTS
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig, MoEConfig

LLADA2 = ModelConfig(
    architecture="LLaDA2MoeModelLM",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=6e5,
    rms_norm_eps=1e-6,
    max_positions=64,
    tie_word_embeddings=False,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=32,
    rotary_dim=4,
    moe=MoEConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=6,
        score="sigmoid",
        norm_topk_prob=True,
        num_shared_experts=1,
        expert_bias=True,
        num_groups=4,
        topk_groups=2,
        first_dense_layers=1,
    ),
)
SDAR_MOE = replace(
    LLADA2,
    architecture="SDARMoeForCausalLM",
    rotary_dim=None,
    moe=MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=6, score="softmax", norm_topk_prob=True),
)
SDAR = replace(LLADA2, architecture="SDARForCausalLM", rotary_dim=None, moe=None, tie_word_embeddings=True)
CONFIGS = {"llada2": LLADA2, "sdar-moe": SDAR_MOE, "sdar": SDAR}


def write_model(folder: Path, config: ModelConfig, **options) -> Path:
    model = Decoder(config)
    init_weights(model, seed=0)
    for name, tensor in model.state_dict().items():
        if name.endswith("expert_bias"):
            tensor.copy_(torch.arange(8) * 1.001)
    save_model(folder, model, dtype=torch.bfloat16, extra={"notes.txt": "beside the weights"}, **options)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


BLOCKS = (8, 6)  # of which the matrices are no multiples
KEPT = ("embed", "lm_head", "norm", "bias", "gate.weight")


def expand(scales: Tensor, shape: torch.Size, blocks: tuple[int, int]) -> Tensor:
    """Each scale over its block, by repetition."""
    wide = scales.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
    return wide[: shape[0], : shape[1]]


def rounded_folder(
    folder: Path,
    config_name: str,
    *,
    apart: bool = False,
    blocks: tuple[int, int] = BLOCKS,
    kept: Sequence[str] = KEPT,
    gain: float = 1.0,
) -> dict[str, Tensor]:
    """Write a model folder with FP8 matrices; the float32 tensors that its files stand for.

    apart   the scales lie in a file of their own
    kept    parts of the names of matrices that are not FP8
    gain    how much larger the matrices are than they were
    """
    write_model(folder, CONFIGS[config_name])
    stored, scales, meaning = load_file(folder / WEIGHTS), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in stored.items():
        meaning[name] = tensor.float()
        if tensor.dim() != 2 or any(part in name for part in kept):
            continue
        rows, columns = -(-tensor.shape[0] // blocks[0]), -(-tensor.shape[1] // blocks[1])
        scale = torch.linspace(0.01, 0.03, rows * columns).reshape(rows, columns)
        wide = expand(scale, tensor.shape, blocks)
        stored[name] = (tensor.float() / wide).to(torch.float8_e4m3fn)
        scales[f"{name}_scale_inv"] = scale * gain
        meaning[name] = stored[name].float() * expand(scale * gain, tensor.shape, blocks)
    (folder / WEIGHTS).unlink()
    files = {"first.safetensors": stored, "second.safetensors": scales} if apart else {WEIGHTS: stored | scales}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    if apart:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(blocks)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert scales
    return meaning
