"""Whether an answer of the study on a real model is right, by task."""

import json
from collections.abc import Callable

from pydantic import ValidationError

from research.real.data import PackageFields


def same_fields(wanted: str, text: str) -> bool:
    """Whether a text is a JSON object with the fields and values of `wanted`."""
    try:
        return bool(json.loads(text) == json.loads(wanted))
    except ValueError:
        return False


def has_schema(text: str) -> bool:
    """Whether a text is JSON of the schema of `package-fields`."""
    try:
        PackageFields.model_validate_json(text)
    except ValidationError:
        return False
    return True


def same_number(wanted: str, text: str) -> bool:
    """Whether the last number of a text is the wanted number, as GSM8K is graded."""
    from mbd_core.evaluation.tasks.kinds.mathematics import GSM8K

    problem = GSM8K.problem("0", {"question": "", "answer": wanted})
    return GSM8K.grader.judge(problem, text).correct


GRADERS: dict[str, Callable[[str, str], bool]] = {
    "gsm-mini": same_number,
    "package-fields": same_fields,
    "third-person": lambda wanted, text: text.strip() == wanted,
    "gsm8k": same_number,
}
