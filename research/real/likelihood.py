"""How likely answers are to the base as it was fetched, which reads each after its question."""

import functools
from collections.abc import Callable

import torch

from mbd_core.batch.likelihood import Draws, log_likelihood
from mbd_core.checkpoint.chat import chat_prompt
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.serving.tokens.load import engine_dtype


def read_by(model: str) -> Callable[[str, str], tuple[float, int]]:
    """Of a question and an answer, the answer's negative log-likelihood in nats, and its tokens without an end token.

    The model is one of causal rows, in an engine's precision. The tokens are those of its tokenizer for the text.
    """
    folder = read_folder(model_folder(model))
    network = load_model(folder.path, dtype=engine_dtype("auto", folder, torch.device("cpu")))

    @functools.cache  # arms often give the same answer
    def read(question: str, answer: str) -> tuple[float, int]:
        prompt = chat_prompt(folder.tokenizer, [{"role": "user", "content": question}])
        tokens = folder.tokenizer(answer, add_special_tokens=False).input_ids
        return -log_likelihood(network, prompt, tokens, block_size=1, draws=Draws(number=1)), len(tokens)

    return read
