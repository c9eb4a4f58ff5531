"""How a request draws its tokens. The API's requests use the types of its fields, with their bounds."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from mbd_core.fields import MOST, Ge, Le, configuration

LEAST = 1e-6  # the least temperature above 0 and the least top_p; float32 is not exact enough for smaller values
MAX_BIASES = 1024  # entries of a logit_bias
MAX_STOP_IDS = 128  # tokens of a request that end its answer, beside the model's EOS

TopP = Annotated[float, Ge(LEAST), Le(1)]
MinP = Annotated[float, Ge(0), Le(1)]
DrawSeed = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
Bias = Annotated[float, Ge(-100), Le(100)]
RepetitionPenalty = Annotated[float, Ge(LEAST), Le(100)]
Penalty = Annotated[float, Ge(-2), Le(2)]


@configuration()
class Sampling:
    """How a request chooses its tokens.

    temperature         0 is greedy; otherwise logits are divided by it and a token is drawn
    top_p               draw among the likeliest tokens that together reach this probability (1: all)
    top_k               draw among the `top_k` likeliest tokens (0: all)
    min_p               draw among the tokens of at least this share of the likeliest token's probability (0: all)
    seed                the same seed gives the same tokens in any batch
    logit_bias          numbers that are added to the logits of these token ids
    repetition_penalty  changes the logits of tokens in the prompt or the answer: positive logits are divided by it,
                        others are multiplied by it
    frequency_penalty   subtracted from a token's logit for each time that the answer has it
    presence_penalty    subtracted once, if the answer has it
    """

    temperature: Annotated[float, Ge(0), Le(10)] = 0.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Ge(0), Le(MOST)] = 0
    min_p: MinP = 0.0
    seed: DrawSeed = 0
    logit_bias: tuple[tuple[int, Bias], ...] = ()
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0

    def __post_init__(self) -> None:
        if 0 < self.temperature < LEAST:
            raise ValueError(f"temperature={self.temperature} must be 0 or a number from {LEAST} to 10")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; give at most {MAX_BIASES}")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice; give each once")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; otherwise the likeliest token is taken."""
        return self.temperature > 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, for which it must be sorted."""
        return self.draws and (self.top_k > 0 or self.top_p < 1)

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens that the sequence has."""
        return any(getattr(self, name) != neutral for name, neutral in PENALTIES.items())

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen, or tokens dropped by `min_p`."""
        return bool(self.logit_bias) or self.penalises or (self.draws and self.min_p > 0)


PenaltyName = Literal["repetition_penalty", "frequency_penalty", "presence_penalty"]
PENALTIES: dict[PenaltyName, float] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
DRAWING = ("temperature", "top_p", "top_k", "min_p")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """The defaults that a `generation_config.json` gives to a request's fields.

    They are `repetition_penalty`, `max_tokens` (its `max_new_tokens`), and with `do_sample` the fields of `DRAWING`; a
    missing temperature is then 1, as in transformers.

    Raises `ValueError` for a value that no request could have.
    """
    values = {name: value for name, value in generation.items() if value is not None}
    draws, max_tokens = values.get("do_sample", False), values.get("max_new_tokens")
    names = (*DRAWING, "repetition_penalty") if draws else ("repetition_penalty",)
    defaults: dict[str, Any] = {"temperature": 1.0} if draws else {}
    defaults |= {name: values[name] for name in names if name in values}
    if defaults.get("top_k") == -1 and not isinstance(defaults["top_k"], bool):  # vLLM's and SGLang's "no limit"
        defaults["top_k"] = 0
    try:
        if not isinstance(draws, bool):
            raise ValueError(f"do_sample={draws!r} must be true or false")
        Sampling(**defaults)
        if max_tokens is None:
            return defaults
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_new_tokens={max_tokens!r} must be a whole number of at least 1")
    except ValueError as error:
        why = f"generation_config.json: {error}; correct it, or serve with generation_config=ignore"
        raise ValueError(why) from None
    return {**defaults, "max_tokens": max_tokens}
