"""An answer to learn from: the engine's request, its answer, and the forward that decided each token.

A trainer makes it in Python, or reads it from the JSON of a served choice or of another system with the same members:

    {"prompt_token_ids": [91, 17], "token_ids": [4, 8, 15],
     "rollout": {"step_map": [1, 1, 2], "logprobs": [-0.1, -0.4, -0.2],
                 "terminal": {"token_ids": [1], "step_map": [3], "logprobs": [-0.3]}}}

The server adds them where a request has `return_token_ids` and `return_step_map`, and with `return_routed_experts`
also `rollout.experts`; docs/reference/rl.md describes each member. Other members of a choice are ignored.
"""

import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.decoding.answers.piece import ForwardExperts, Piece
from mbd_core.decoding.blocks.config import DecodingConfig


@dataclass(frozen=True, kw_only=True)
class ReplayedAnswer:
    """An answer to learn from: the engine's request, its answer, and the answer's worth.

    answer     its tokens, steps and log-probabilities
    tail       the same of the EOS and the tokens after it in its block; empty if `max_tokens` ended it
    experts    the experts of its forwards, if recorded
    advantage  the weight by which the log-probabilities of all its tokens are raised
    correct    whether it is a correct answer, to be imitated too (`PolicyObjective.nll`)
    template   the request's: fixed tokens have step 0 in the rollout, and are no actions

    Raises `ValueError` for decoding that cannot be replayed (filled tokens change, or a canvas), for a rollout of
    other tokens or without the rest of its last block, and for numbers that are not finite.
    """

    prompt: tuple[int, ...]
    answer: Piece
    decoding: DecodingConfig
    max_tokens: int
    advantage: float
    correct: bool
    tail: Piece = Piece()
    experts: tuple[ForwardExperts, ...] = ()
    template: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if (why := replay_refused(self.decoding)) is not None:
            raise ValueError(why)
        if self.answer.edits:
            raise ValueError("the rollout has tokens that were overwritten: the states of its forwards are not known")
        _check_lengths("tokens", self.answer)
        _check_lengths("tail tokens", self.tail)
        if min(self.steps, default=0) < 0:
            raise ValueError("the rollout has a token with a negative step: no forward decided it")
        if not any(self.steps):
            raise ValueError("no forward decided a token of this answer, so there is nothing to learn from; drop it")
        if not all(math.isfinite(number) for number in (self.advantage, *self.logprobs)):
            raise ValueError("an answer's advantage and its log-probabilities must be finite numbers")
        self._check_end()
        for place, token in enumerate(self.template):
            if (
                token is not None
                and place < len(self.tokens)
                and (self.tokens[place], self.steps[place]) != (token, 0)
            ):
                raise ValueError(f"the template fixes token {place} of the answer, and the rollout has another")

    def _check_end(self) -> None:
        number, size = len(self.steps), self.decoding.block_size
        if number > self.max_tokens:
            raise ValueError(f"the rollout has {number} tokens, more than max_tokens={self.max_tokens}")
        end = len(self.prompt) + number - self.decoding.grid_origin(len(self.prompt))
        if number < self.max_tokens and end % size:
            raise ValueError(
                f"the rollout ends {end % size} tokens into a block of {size}, before max_tokens={self.max_tokens}: "
                "its tail, which the block's other tokens have seen, is missing; keep it (tail)"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.answer.tokens

    @property
    def decided(self) -> tuple[int, ...]:
        """The tokens and the tail's tokens, which are actions too."""
        return (self.answer + self.tail).tokens

    @property
    def steps(self) -> tuple[int, ...]:
        """The forward that decided each of them; 0 for tokens that were there before the first."""
        return (self.answer + self.tail).steps or ()

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The engine's log-probability of each of them in that forward."""
        return (self.answer + self.tail).logprobs or ()


def _check_lengths(noun: str, piece: Piece) -> None:
    tokens, steps, logprobs = len(piece), len(piece.steps or ()), len(piece.logprobs or ())
    if not tokens == steps == logprobs:
        raise ValueError(
            f"the rollout has {steps} steps and {logprobs} log-probabilities of {tokens} {noun}; each needs one"
        )


def replay_refused(decoding: DecodingConfig) -> str | None:
    """The reason why the forwards of a decoding cannot be rebuilt from a step map; `None` if they can."""
    for part in ("causal", "renoise", "verify"):
        if getattr(decoding, part) is not None:
            return (
                f"answers decoded with {part} cannot be replayed: a step map does not say which of their forwards saw "
                f"blocks and which saw a causal row; make the rollouts without {part}"
            )
    for part in ("t2t", "soft", "edit", "canvas"):
        if getattr(decoding, part) is not None:
            return (
                f"answers decoded with {part} cannot be replayed: their forwards have seen more than masks and final "
                f"tokens; make the rollouts without {part}"
            )
    return None


def read_answer(
    choice: Mapping[str, Any],
    *,
    decoding: DecodingConfig,
    max_tokens: int,
    advantage: float,
    correct: bool,
    template: Sequence[int | None] = (),
) -> ReplayedAnswer:
    """The answer of a choice; `decoding`, `max_tokens` and `template` are its request's.

    Raises `ValueError`, one sentence, for a member that is missing or of another kind, and for decoding that cannot be
    replayed.
    """
    rollout = _member(choice, "rollout")
    terminal = _member(rollout, "terminal", of="rollout.")
    return ReplayedAnswer(
        prompt=_integers(choice, "prompt_token_ids"),
        answer=Piece(
            tokens=_integers(choice, "token_ids"),
            steps=_integers(rollout, "step_map", of="rollout."),
            logprobs=_numbers(rollout, "logprobs", of="rollout."),
        ),
        tail=Piece(
            tokens=_integers(terminal, "token_ids", of="rollout.terminal."),
            steps=_integers(terminal, "step_map", of="rollout.terminal."),
            logprobs=_numbers(terminal, "logprobs", of="rollout.terminal."),
        ),
        experts=tuple(map(_experts, rollout.get("experts") or ())),
        decoding=decoding,
        max_tokens=max_tokens,
        advantage=advantage,
        correct=correct,
        template=tuple(template),
    )


def _experts(record: Mapping[str, Any]) -> ForwardExperts:
    try:
        ids = b64decode(record["ids"], validate=True)
        forward, start, shape = record["forward"], record["start"], record["shape"]
        return ForwardExperts.of({"forward": forward, "start": start, "shape": shape, "ids": ids})
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"the answer's 'rollout.experts' has a record that cannot be read ({error!r:.80})") from None


def _member(values: Mapping[str, Any], name: str, *, of: str = "", is_list: bool = False) -> Any:
    if name not in values:
        raise ValueError(
            f"the answer has no '{of}{name}', without which it cannot be replayed; ask for it with return_token_ids "
            "and return_step_map, and keep the whole answer"
        )
    if not isinstance(values[name], list if is_list else Mapping):
        raise ValueError(
            f"the answer's '{of}{name}' is {values[name]!r:.80}, not {'a list' if is_list else 'an object'}"
        )
    return values[name]


def _integers(values: Mapping[str, Any], name: str, *, of: str = "") -> tuple[int, ...]:
    items = _member(values, name, of=of, is_list=True)
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        raise ValueError(f"the answer's '{of}{name}' is a list of whole numbers of at least 0, not {items!r:.80}")
    return tuple(items)


def _numbers(values: Mapping[str, Any], name: str, *, of: str = "") -> tuple[float, ...]:
    items = _member(values, name, of=of, is_list=True)
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
        raise ValueError(f"the answer's '{of}{name}' is a list of numbers, not {items!r:.80}")
    return tuple(map(float, items))
