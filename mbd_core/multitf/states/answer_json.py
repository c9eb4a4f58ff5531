"""An answer to learn from, read from the JSON of a served choice, or of another system that writes the same members.

    {"prompt_token_ids": [91, 17], "token_ids": [4, 8, 15],
     "rollout": {"step_map": [1, 1, 2], "logprobs": [-0.1, -0.4, -0.2],
                 "terminal": {"token_ids": [1], "step_map": [3], "logprobs": [-0.3]}}}

The server adds them where a request has `return_token_ids` and `return_step_map`; docs/reference/rl.md says what each
one is. What else a choice has is ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Rollout
from mbd_core.multitf.states.replay import ReplayedAnswer


def read_answer(
    choice: Mapping[str, Any],
    *,
    decoding: DecodingConfig,
    max_tokens: int,
    advantage: float,
    correct: bool,
    template: Sequence[int | None] = (),
) -> ReplayedAnswer:
    """The answer of a choice; `decoding`, `max_tokens` and `template` are those that the request was decoded with.

    Raises `ValueError`, one sentence, for a member that is missing or of another kind, and for what is not replayed.
    """
    rollout = _member(choice, "rollout")
    terminal = _member(rollout, "terminal", of="rollout.")
    return ReplayedAnswer(
        prompt=_integers(choice, "prompt_token_ids"),
        tokens=_integers(choice, "token_ids"),
        rollout=Rollout(
            steps=_integers(rollout, "step_map", of="rollout."),
            logprobs=_numbers(rollout, "logprobs", of="rollout."),
            tail_tokens=_integers(terminal, "token_ids", of="rollout.terminal."),
            tail_steps=_integers(terminal, "step_map", of="rollout.terminal."),
            tail_logprobs=_numbers(terminal, "logprobs", of="rollout.terminal."),
        ),
        decoding=decoding,
        max_tokens=max_tokens,
        advantage=advantage,
        correct=correct,
        template=tuple(template),
    )


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
