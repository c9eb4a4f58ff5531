"""Texts scored by a model: the log-likelihood of each, and whether greedy decoding gives it."""

import json
from collections.abc import Sequence

from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.inputs import ScoredTexts
from mbd_core.batch.likelihood import Draws, log_likelihood
from mbd_core.batch.rows import DecodedRow
from mbd_core.decoding.blocks.config import DecodingConfig, read_decoding
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.engine import Engine


def scores_of(model: DecodingModel, row: DecodedRow) -> list[tuple[float, bool]]:
    """The log-likelihood of each of a row's texts, in nats, and whether greedy decoding gives the text's tokens (false
    if the row does not ask). Raises `ValueError` for a text that the model does not hold."""
    texts = ScoredTexts.of_input(row["input"])
    assert texts is not None
    engine, draws = model.engine, Draws(number=texts.draws, seed=texts.seed)
    decoding = read_decoding(json.loads(row["config"]))
    scores = []
    for context, continuation in texts.ids(model.tokenizer, prefix_id=engine.model.config.eos_token_ids[0]):
        nats = log_likelihood(engine.model, context, continuation, block_size=engine.block_size, draws=draws)
        scores.append((nats, texts.greedy and is_greedy(engine, context, continuation, decoding)))
    return scores


def is_greedy(engine: Engine, context: Sequence[int], continuation: Sequence[int], decoding: DecodingConfig) -> bool:
    """Whether greedy decoding after the context gives these tokens; true if there are none."""
    if not continuation:
        return True
    request = Request(
        request_id="greedy",
        prompt=tuple(context),
        max_tokens=len(continuation),
        decoding=decoding,
        ignore_eos=True,
    )
    (output,) = engine.generate([request])
    return output.tokens == tuple(continuation)
