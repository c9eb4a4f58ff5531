"""The causal stream of a sample, in which the model keeps or learns its autoregressive (AR) mode (TiDAR, Nemotron).

It is one more stream of the training sequence. A token's block is its place, and all tokens are of one noise-group. So
by the mask's own rule (Eq. B.7) a token sees itself and the tokens before it in its stream, and nothing else:

AR    1 2 3 4
    1 x             block  0 1 2 3
    2 x x           first  0 0 0 0
    3 x x x         label  the next token, where an answer has it
    4 x x x x

No noisy token sees the stream, so the other labels' losses and gradients are those of the sequence without it. It
costs as many tokens as the clean stream. The clean stream itself cannot have the labels: it is block-causal, so its
tokens see the tokens that they would predict.

Of a model that stores its keys by causal rows (`StateConfig.clean`) the clean stream is causal. It has the labels
itself, at no cost.
"""

from collections.abc import Sequence

from mbd_core.multitf.data.example import IGNORE, Example, answer_labels
from mbd_core.multitf.states.batch import AR_SLOT, SequenceColumns
from mbd_core.multitf.states.layout import SAMPLE_MEANS, StateConfig


def add_causal_stream(row: SequenceColumns, example: Example, config: StateConfig) -> None:
    """Adds the causal stream of a conversation after the streams of `row`, which may be empty.

    In each trained answer and the first EOS after it, a token is the label of the place before it, and that place is
    the label's `source`. If weights are means, the weights of an answer's labels add up to `ar_weight` divided by the
    number of answers; otherwise each label has `ar_weight`.
    """
    labels, weights = _labels_and_weights(example, config)
    length = 1 + max((place for place, label in enumerate(labels) if label != IGNORE), default=0)
    start = len(row["input_ids"])
    columns = causal_columns(example.tokens[:length]) | {
        "stream": [1 + max(row["stream"], default=0)] * length,
        "labels": labels[:length],
        "weights": weights[:length],
        "source": list(range(start, start + length)),
        "slot": [AR_SLOT] * length,
    }
    for name, column in columns.items():
        row[name] += column


def causal_columns(text: Sequence[int]) -> SequenceColumns:
    """The columns of a text that is read causally, without labels."""
    places, zeros = list(range(len(text))), [0] * len(text)
    return {
        "input_ids": list(text),
        "positions": places,
        "stream": [1] * len(text),
        "block": places,
        "first": zeros,
        "labels": [IGNORE] * len(text),
        "weights": [0.0] * len(text),
        "source": places,
        "rollout": [False] * len(text),
        "slot": zeros,
        "ratio": [0.0] * len(text),
    }


def label_clean_stream(row: SequenceColumns, example: Example, config: StateConfig) -> None:
    """Gives the same labels to a clean stream whose tokens see the tokens before them."""
    start = row["stream"].index(0)
    labels, weights = _labels_and_weights(example, config)
    for name, column in (("labels", labels), ("weights", weights), ("slot", [AR_SLOT] * len(labels))):
        row[name][start : start + len(labels)] = column


def _labels_and_weights(example: Example, config: StateConfig) -> tuple[list[int], list[float]]:
    answers = (*example.earlier, example)
    labels, weights = [IGNORE] * len(example.tokens), [0.0] * len(example.tokens)
    for answer in answers:
        learned = next_tokens(answer)
        scale = len(learned) * len(answers) if config.weighting in SAMPLE_MEANS else 1
        for place, label in learned.items():
            labels[place], weights[place] = label, config.ar_weight / scale
    return labels, weights


def next_tokens(answer: Example) -> dict[int, int]:
    """The tokens of an answer and the first EOS after it, each by the place before it. Nothing predicts place 0."""
    labels = answer_labels(answer.tokens, answer.prompt_length, kept_fill=1)
    return {place - 1: label for place, label in enumerate(labels) if label != IGNORE and place}
