"""Log-probabilities in OpenAI's shapes."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from local_server import answers
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mbd_core.decoding.answers.piece import Piece
from mbd_core.serving.text.logprobs import ChoiceLogprobs, TokenTexts


def test_extremes_of_a_logprob_are_json() -> None:
    logprobs = ChoiceLogprobs(lambda token: ("a", b"a"), lambda tokens: "a" * len(tokens), chat=False)  # type: ignore[arg-type]
    entries = logprobs.add(Piece(tokens=(1, 2), logprobs=(-math.inf, -0.5)))
    assert entries["token_logprobs"] == [-9999.0, -0.5]
    assert entries["text_offset"] == [0, 1]


def test_an_id_that_the_tokenizer_has_not_has_no_text(tiny_model_dir: Path) -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert TokenTexts(tokenizer)(len(tokenizer) + 3) == ("", b"")


OWL = "🦉"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def byte_folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer falls back to the pieces <0x00> to <0xFF>, as Gemma's does."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    shutil.copytree(tiny_model_dir, folder)
    pieces = ["<mask>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcde"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def test_a_piece_of_a_character_has_its_byte(byte_folder: Path) -> None:
    forced = {"guided_choice": [OWL], "max_tokens": 8}
    messages: Any = [{"role": "user", "content": "a b"}]
    free = {"prompt": "a b", "logprobs": 5, "max_tokens": 12, "ignore_eos": True}
    chat, completion, unheld = answers(
        byte_folder,
        ("chat", forced | {"messages": messages, "logprobs": True, "top_logprobs": 5}),
        ("complete", forced | {"prompt": "a b", "logprobs": 5}),
        ("complete", free),
    )
    assert chat[0]["choices"][0]["message"]["content"] == completion[0]["choices"][0]["text"] == OWL
    entries = chat[0]["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in OWL.encode()]
    columns = completion[0]["choices"][0]["logprobs"]
    assert columns["tokens"] == [f"bytes:\\x{byte:02x}" for byte in OWL.encode()]
    columns = unheld[0]["choices"][0]["logprobs"]
    assert any(name.startswith("bytes:") for tops in columns["top_logprobs"] for name in tops)
    assert {len(tops) for tops in columns["top_logprobs"]} <= {5, 6}, "five pieces, and the place's own"


def test_what_only_looks_like_a_byte_is_text(byte_folder: Path, tiny_model_dir: Path) -> None:
    fallback = AutoTokenizer.from_pretrained(byte_folder)
    texts = TokenTexts(fallback)
    shown = {piece: texts(fallback.convert_tokens_to_ids(piece)) for piece in ("<0x41>", "<0x0A>", "▁", "a")}
    assert shown == {
        "<0x41>": ("A", b"A"),
        "<0x0A>": ("\n", b"\n"),
        "▁": (" ", b" "),
        "a": ("a", b"a"),
    }
    byte_level = AutoTokenizer.from_pretrained(tiny_model_dir)
    byte_level.add_tokens(["<0xF0>"])
    assert TokenTexts(byte_level)(byte_level.convert_tokens_to_ids("<0xF0>")) == ("<0xF0>", b"<0xF0>")
