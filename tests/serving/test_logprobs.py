"""Log-probabilities in OpenAI's shapes."""

import math

from mbd_core.serving.logprobs import ChoiceLogprobs


def test_extremes_of_a_logprob_are_json() -> None:
    logprobs = ChoiceLogprobs(lambda token: ("a", b"a"), lambda tokens: "a" * len(tokens), chat=False)  # type: ignore[arg-type]
    entries = logprobs.add((1, 2), (-math.inf, -0.5))
    assert entries["token_logprobs"] == [-9999.0, -0.5]
    assert entries["text_offset"] == [0, 1]
