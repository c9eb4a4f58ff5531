"""The parts of a reward: a part gives an answer a number, gives nothing if it does not apply, or fails."""

import sys
from dataclasses import dataclass
from typing import Any

from mbd_core.rl.rows import JudgedRow

CORRECT, TPF = "correct", "tpf"  # the parts that are no function and no service


@dataclass(frozen=True)
class Failure:
    """A part gave no reward for an answer; `why` is the rest of a sentence that begins with the part."""

    why: str


RewardOutcome = float | None | Failure
"""`None`: the part does not apply to this answer."""


class RewardFailed(RuntimeError):
    """A part of the reward cannot be computed."""


def outcome_of(value: Any) -> RewardOutcome:
    """A part's result as an outcome: a finite number or `None`; any other value is a failure."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        return Failure(f"gave {str(value)[:80]}, which is no finite number")
    return float(value)


def is_finite(value: float) -> bool:
    """Whether a float can hold the value; an integer may be too large."""
    return abs(value) <= sys.float_info.max


def question(row: JudgedRow) -> dict[str, str]:
    """The fields of a decoded answer that a function or a service gets."""
    return {
        "prompt": row["prompt"],
        "text": row["text"] or "",
        "reference": row["reference"],
        "problem_id": row["problem_id"],
    }


def failed(name: str, failure: Failure, row: JudgedRow) -> RewardFailed:
    return RewardFailed(f"reward '{name}' {failure.why}, for an answer to {row['problem_id']}")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a group; the others followed from it."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
