"""A GGUF file of a folder that transformers wrote, with llama.cpp's names and order of rotary channels."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mbd_core.checkpoint.safetensor_files import HfFolder

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    *,
    name: str = "tiny",
    q8: bool = False,
    fields: Mapping[str, int] = MappingProxyType({}),
    dropped: str | None = None,
    more: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """The weights in float32, or the matrices in Q8_0; with other fields, without one tensor, with more tensors."""
    import gguf
    from transformers import PreTrainedTokenizerFast

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, tokenizer, config["vocab_size"])
    for key, value in fields.items():
        writer.add_uint32(key, value)
    for key, tensor in more.items():
        writer.add_tensor(key, tensor.numpy())
    weights = HfFolder(folder)
    for theirs in weights.tensors:
        tensor = weights.read(theirs).float()
        if architecture == "llama" and "q_proj" in theirs:
            tensor = _interleaved(tensor, heads)
        if architecture == "llama" and "k_proj" in theirs:
            tensor = _interleaved(tensor, kv_heads)
        values = tensor.numpy()
        kind = None
        if q8 and tensor.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.quantize(values, kind)
        if _name(theirs) != dropped:
            writer.add_tensor(_name(theirs), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {entry.content for entry in tokenizer.added_tokens_decoder.values()}
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _name(theirs: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, leaf = theirs.rpartition(".")
    if module in whole:
        return f"{whole[module]}.{leaf}"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{NAMES[part]}.{leaf}"


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """A Llama's query or key rows in llama.cpp's order: the two halves of a head's channels alternate."""
    per_head = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return torch.swapaxes(per_head, 1, 2).reshape(rows.shape).contiguous()
