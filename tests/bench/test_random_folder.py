"""A random model's folder can be served, and each of its tokens shows as text."""

from dataclasses import replace
from pathlib import Path

import pytest

from mbd_core.bench.random_folder import MAX_POSITIONS, whole_vocabulary, write_random_folder
from mbd_core.checkpoint.chat import chat_prompt, decode_text, question
from mbd_core.checkpoint.folder import read_folder
from mbd_core.models.shapes import SDAR_50M, SHAPES

SMALL = replace(SDAR_50M, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)


def test_the_folder_passes_the_check_of_every_served_model(tmp_path: Path) -> None:
    write_random_folder(SMALL, tmp_path / "random")
    folder = read_folder(tmp_path / "random")
    assert (folder.config.mask_token_id, folder.config.eos_token_ids) == (SMALL.mask_token_id, SMALL.eos_token_ids)
    assert folder.config.max_positions == MAX_POSITIONS < SMALL.max_positions
    assert len(folder.tokenizer) == SMALL.vocab_size
    assert (folder.defaults["tokens_per_step"], folder.defaults["block_size"]) == (4, 32)


def test_every_token_but_the_special_ones_and_parts_of_characters_has_a_text_of_its_own() -> None:
    tokenizer = whole_vocabulary(SDAR_50M)
    special = {SDAR_50M.mask_token_id, *SDAR_50M.eos_token_ids}
    texts = {n: decode_text(tokenizer, [n]) for n in range(SDAR_50M.vocab_size)}
    silent = {n for n, text in texts.items() if not text}
    assert special <= silent
    assert silent - special == set(tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"]))
    broken = [n for n, text in texts.items() if "\ufffd" in text]
    assert len(broken) == 128  # the bytes that only parts of characters have
    told = set(texts) - silent - set(broken)
    assert len({texts[n] for n in told}) == len(told)


def test_text_comes_back() -> None:
    tokenizer = whole_vocabulary(SDAR_50M)
    text = "Tom has 12 pens, é and 笔."
    assert decode_text(tokenizer, tokenizer.encode(text)) == text
    assert max(chat_prompt(tokenizer, question(text))) < SDAR_50M.mask_token_id


def test_a_vocabulary_too_small_for_text_is_refused() -> None:
    with pytest.raises(ValueError, match="64 tokens is too small"):
        whole_vocabulary(SHAPES["sdar-null"])
