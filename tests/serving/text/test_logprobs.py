"""Log-probabilities in OpenAI's shapes."""

import math
from pathlib import Path

from transformers import AutoTokenizer

from mbd_core.serving.text.logprobs import ChoiceLogprobs, TokenTexts


def test_extremes_of_a_logprob_are_json() -> None:
    logprobs = ChoiceLogprobs(lambda token: ("a", b"a"), lambda tokens: "a" * len(tokens), chat=False)  # type: ignore[arg-type]
    entries = logprobs.add((1, 2), (-math.inf, -0.5))
    assert entries["token_logprobs"] == [-9999.0, -0.5]
    assert entries["text_offset"] == [0, 1]


def test_an_id_that_the_tokenizer_has_not_has_no_text(tiny_model_dir: Path) -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert TokenTexts(tokenizer)(len(tokenizer) + 3) == ("", b"")
