"""Loads model folders as anybody would, by transformers and the code in the folder, and writes their logits.

`plain_transformers.py TOKENS.safetensors OUT.safetensors FOLDER ...`: a folder's logits have its path as their name.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(tokens: str, out: str, *folders: str) -> None:
    given = load_file(tokens)
    logits = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
        mask = given["full" if model.config.model_type in ("llada", "Dream") else "blocks"].bool()
        with torch.no_grad():
            logits[folder] = model(given["input_ids"], attention_mask=mask).logits
        assert AutoTokenizer.from_pretrained(folder).mask_token is not None
    assert "mbd_core" not in sys.modules
    save_file(logits, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
