"""Autoregressive folders of random weights, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
from mbd_core.models.shapes import SHAPES


def base_folder(folder: Path, kind: str, shape: str, **changes: Any) -> Path:
    """A random model as transformers writes it, with a tokenizer and a chat template."""
    ours = SHAPES[shape]
    sizes: dict[str, Any] = {
        "vocab_size": ours.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": list(ours.eos_token_ids),
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**sizes, **changes}))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(0.0, 0.3) if tensor.ndim > 1 else tensor.normal_("norm" in name, 0.1)
    model.eval().save_pretrained(folder)
    shape_tokenizer(ours).save_pretrained(folder)
    (folder / "LICENSE").write_text("Apache-2.0\n")
    return folder
