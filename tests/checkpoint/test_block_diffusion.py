"""Block-diffusion folders made of autoregressive ones: the same network, the mask that is chosen, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from base_folders import base_folder
from transformers import PreTrainedTokenizerFast

from jobs.convert_checkpoint import main
from mbd_core.checkpoint.adaptation.mask_choice import choose_mask
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_random
from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.models.shapes import SHAPES
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.serving.tokens.load import load_engine

LENGTH = 24
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e5,
}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "shape", "layout", "architecture", "model_type", "changes"),
    [
        ("Llama", "tiny-llama", "a2d", "A2DLlamaLMHeadModel", "a2d-llama", {"rope_parameters": LLAMA3}),
        ("Llama", "tiny-llama", "a2d", "A2DLlamaLMHeadModel", "a2d-llama", {"tie_word_embeddings": True}),
        ("Qwen2", "tiny-qwen2", "a2d", "A2DQwen2LMHeadModel", "a2d-qwen2", {}),
        ("Qwen2", "tiny-qwen2", "fast-dllm-v2", "Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", {}),
        ("Qwen3", "tiny-qwen3", "a2d", "A2DQwen3LMHeadModel", "a2d-qwen3", {"head_dim": 16}),
        ("Qwen3", "tiny-qwen3", "sdar", "SDARForCausalLM", "sdar", {"head_dim": 16}),
        ("Qwen3Moe", "tiny-qwen3-moe", "sdar", "SDARMoeForCausalLM", "sdar_moe", MOE),
    ],
)
@torch.inference_mode()
def test_the_logits_under_a_block_causal_mask_are_those_of_transformers(
    tmp_path: Path, kind: str, shape: str, layout: str, architecture: str, model_type: str, changes: dict[str, Any]
) -> None:
    base, made = base_folder(tmp_path / "base", kind, shape, **changes), tmp_path / "made"
    assert run(base, "--to", "block-diffusion", "--out", made, "--block-size", 8, "--layout", layout) == 0
    config = json.loads((made / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == ([architecture], model_type)
    assert (made / "LICENSE").read_text() == "Apache-2.0\n"
    folder = read_folder(made)
    assert folder.tokenizer.mask_token_id == folder.config.mask_token_id == config["mask_token_id"]
    assert folder.tokenizer.chat_template == read_folder(base).tokenizer.chat_template
    assert (folder.config.block_size, folder.defaults["block_size"], folder.defaults["buffer_size"]) == (8, 8, 1)
    # other code loads it as the base's module; the class names are those of dllm's and SDAR's own files
    config["model_type"] = json.loads((base / "config.json").read_text())["model_type"]
    (made / "config.json").rename(made / "ours")
    (made / "config.json").write_text(json.dumps(config))
    theirs = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(made).eval()
    (made / "ours").replace(made / "config.json")
    ids_T = torch.randint(3, SHAPES[shape].vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    blocks_T = torch.arange(LENGTH) // 8
    sees_TT = blocks_T[:, None] >= blocks_T
    expected = theirs(ids_T[None], attention_mask=sees_TT[None, None]).logits[0]
    model = load_model(made)
    hidden = model(ids_T[None], torch.arange(LENGTH)[None], DenseAttention(sees_TT[None, None]))[0]
    torch.testing.assert_close(model.logits(hidden)[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)
    loaded = load_engine(made, EngineConfig(max_rows=2, num_pages=32))
    decoding = decoding_config(folder.defaults, {"buffer_size": 2}, block_size=8)
    request = Request(request_id="0", prompt=tuple(ids_T.tolist()), max_tokens=12, decoding=decoding)
    assert len(loaded.engine.generate([request])[0].tokens) > 0


def tokenizer_of(shape: str, **roles: str) -> PreTrainedTokenizerFast:
    tokenizer = shape_tokenizer(SHAPES[shape])
    tokenizer.add_special_tokens(roles)
    return tokenizer


def test_the_mask_is_the_tokenizers_own_or_an_unused_special_token_or_new() -> None:
    tokenizer = tokenizer_of("tiny-llama")
    ends, size = SHAPES["tiny-llama"].eos_token_ids, len(tokenizer)
    new = choose_mask(tokenizer, ends)
    assert (new.token, new.token_id, new.is_new) == ("<|mask|>", size, True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<repo_name>", "<empty_output>"]})
    unused = choose_mask(tokenizer, ends)
    assert (unused.token, unused.token_id, unused.is_new) == ("<empty_output>", size + 1, False)
    assert choose_mask(tokenizer, ends, "<repo_name>").token_id == size
    assert choose_mask(tokenizer, [*ends, size + 1]).token == "<repo_name>"
    assert choose_mask(tokenizer, ends, "<|hole|>").is_new
    tokenizer.add_special_tokens({"mask_token": "<repo_name>"})
    assert choose_mask(tokenizer, ends).token == "<repo_name>"
    for token in (tokenizer.eos_token, "<|im_start|>", tokenizer.convert_ids_to_tokens(200)):
        with pytest.raises(ValueError, match=r"such as <empty_output>$"):
            choose_mask(tokenizer, ends, token)


def test_a_vocabulary_grows_only_where_the_mask_has_no_row(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "Qwen2", "tiny-qwen2")
    size = SHAPES["tiny-qwen2"].vocab_size
    assert run(base, "--to", "block-diffusion", "--out", tmp_path / "made") == 0
    made, before = load_model(tmp_path / "made"), load_model(base)
    assert (made.config.mask_token_id, made.config.block_size) == (size, 32)
    assert made.config.vocab_size == -(-(size + 1) // 64) * 64
    for ours, theirs in ((made.model.embed_tokens, before.model.embed_tokens), (made.lm_head, before.lm_head)):
        assert torch.equal(ours.weight[:size], theirs.weight)
        torch.testing.assert_close(ours.weight[-1], theirs.weight.mean(0))


@pytest.mark.parametrize(
    ("shape", "given", "sentence"),
    [
        ("tiny-qwen3-moe", [], "give --layout sdar"),
        ("tiny-qwen2", ["--layout", "sdar"], "give --layout a2d"),
        ("tiny-qwen3", ["--mask-token", "<|im_end|>"], "take a new one, such as <|mask|>"),
        ("tiny-qwen3", ["--block-size", "513"], "--block-size 513 is more than the 512 positions of"),
        ("tiny-a2d-llama", [], "convert an autoregressive model"),
        ("tiny-sdar", [], "convert an autoregressive model"),
    ],
)
def test_refusals_are_one_sentence_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, given: list[str], sentence: str
) -> None:
    save_random(SHAPES[shape], tmp_path / "base", tokenizer=shape_tokenizer(SHAPES[shape]))
    assert run(tmp_path / "base", "--to", "block-diffusion", "--out", tmp_path / "made", *given) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral'"),
    ],
)
def test_a_network_that_is_not_known_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], sentence: str
) -> None:
    base = base_folder(tmp_path / "base", "Qwen2", "tiny-qwen2")
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    capsys.readouterr()
    assert run(base, "--to", "block-diffusion", "--out", tmp_path / "made") == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert run(base, "--mask-token", "<x>", "--out", tmp_path / "made") == 2
    assert "needs --to block-diffusion" in capsys.readouterr().err
