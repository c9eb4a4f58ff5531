"""A folder of random weights, by the command that makes it, can be served and trained."""

from pathlib import Path

import pytest
import torch

from jobs.convert_checkpoint import main
from mbd_core.checkpoint.chat import chat_prompt, decode_text, question
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer, special_ids
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.models.shapes import SDAR_50M, SHAPES
from mbd_core.multitf.data.encoding import encode_chats, fill_token
from mbd_core.serving.tokens.load import load_engine

TEXT = "Tom has 12 pens, é and 笔.\n"
TINY = [name for name in SHAPES if name.startswith("tiny-")]


@pytest.mark.parametrize("shape", TINY)
def test_a_random_folder_answers_a_chat(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--random", shape, "--out", str(tmp_path / shape)]) == 0
    folder, wanted = read_folder(tmp_path / shape), SHAPES[shape]
    assert (folder.config.mask_token_id, folder.config.eos_token_ids) == (wanted.mask_token_id, wanted.eos_token_ids)
    assert folder.defaults.get("tokens_per_step") == (4 if wanted.attention == "block_causal" else None)
    with load_engine(tmp_path / shape, EngineConfig(max_rows=1), device=torch.device("cpu")) as loaded:
        prompt = tuple(chat_prompt(loaded.tokenizer, question(TEXT)))
        assert decode_text(loaded.tokenizer, prompt).count(TEXT) == 1
        request = Request(
            request_id="chat", prompt=prompt, max_tokens=40, decoding=loaded.decoding({}), ignore_eos=True
        )
        loaded.engine.add(request)
        outputs = []
        while loaded.engine.has_work:
            outputs += loaded.engine.step()
    assert sum(len(output.piece.tokens) for output in outputs) == 40
    assert decode_text(loaded.tokenizer, [token for output in outputs for token in output.piece.tokens])
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / shape}; ")


def test_an_answer_is_trained_up_to_its_end() -> None:
    for config in map(SHAPES.__getitem__, TINY):
        tokenizer = shape_tokenizer(config)
        chat = [*question("How many?"), {"role": "assistant", "content": TEXT}]
        (sample,) = encode_chats(tokenizer, [("chat", chat)], eos_token_id=fill_token(tokenizer, config))
        assert decode_text(tokenizer, sample.response).rstrip() == TEXT.rstrip()
        assert max(sample.prompt + sample.response) < config.vocab_size


def test_special_tokens_have_the_released_ids() -> None:
    """And those of the configuration where the vocabulary is another."""
    for shape, wanted in {
        "sdar-1.7b": {"<|MASK|>": 151669, "<|im_end|>": 151645, "<|endoftext|>": 151643, "<|im_start|>": 151644},
        "llada2-mini": {"<|mask|>": 156895, "<|endoftext|>": 156892, "<|role_end|>": 156900},
        "llada-8b": {"<|mdm_mask|>": 126336, "<|endoftext|>": 126081, "<|eot_id|>": 126348, "<|startoftext|>": 126080},
        "dream-7b": {"<|mask|>": 151666, "<|endoftext|>": 151643, "<|im_end|>": 151645},
        "tiny-sdar": {"<|MASK|>": 250, "<|im_end|>": 251},
    }.items():
        found = special_ids(SHAPES[shape])
        assert {name: found[name] for name in wanted} == wanted
        assert len(set(found.values())) == len(found)
    config = SHAPES["sdar-1.7b"]
    tokenizer = shape_tokenizer(config)
    assert len(tokenizer) == config.vocab_size
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in special_ids(config)} == special_ids(config)
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (151669, 151645)


def test_every_token_but_the_special_ones_and_parts_of_characters_has_a_text_of_its_own() -> None:
    tokenizer = shape_tokenizer(SDAR_50M)
    texts = {n: decode_text(tokenizer, [n]) for n in range(SDAR_50M.vocab_size)}
    silent = {n for n, text in texts.items() if not text}
    assert silent == set(tokenizer.convert_tokens_to_ids(["<|MASK|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>"]))
    broken = [n for n, text in texts.items() if "\ufffd" in text]
    assert len(broken) == 128  # the bytes that only parts of characters have
    told = set(texts) - silent - set(broken)
    assert len({texts[n] for n in told}) == len(told)


@pytest.mark.parametrize("shape", ["sdar-50m", *TINY])
def test_text_comes_back(shape: str) -> None:
    tokenizer = shape_tokenizer(SHAPES[shape])
    every = "".join(map(chr, [*range(0x20, 0x250), 0x800, 0xFFFD, 0x10000, 0x10FFFF]))
    for text in (TEXT, every):
        assert decode_text(tokenizer, tokenizer.encode(text)) == text


def test_a_vocabulary_too_small_for_text_gets_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError):
        shape_tokenizer(SHAPES["sdar-null"])
    assert main(["--random", "sdar-null", "--out", str(tmp_path / "null")]) == 0
    assert "sdar-null gets no tokenizer: 64 tokens cannot write text" in capsys.readouterr().out
    assert not (tmp_path / "null" / "tokenizer.json").exists()
