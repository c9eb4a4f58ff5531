"""The form of request that an endpoint takes, learned from its refusals of the usual form.

Endpoints of reasoning models want `max_completion_tokens` and no temperature, others take no `stop` or `seed`. Such an
endpoint is asked for a token until it answers, each time without the field that it names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

MOST_CHANGES = 8
LIMIT, NEW_LIMIT = "max_tokens", "max_completion_tokens"
SPELLINGS = {
    "temperature": r"temperature",
    "top_p": r"top_?p\b",
    "seed": r"seed",
    "stop": r"stop(?:_?sequences?)?\b",
    LIMIT: r"max_?(?:completion_?|output_?)?tokens",
}
LEAST = re.compile(
    r"(?:>=|at least|minimum(?: value)?(?: of)?|greater than or equal to)\D{0,20}(\d{1,4})", re.IGNORECASE
)
ENDED_EARLY = re.compile(r"output limit was reached|could not finish the message", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RequestForm:
    """How an endpoint's requests differ from usual requests.

    renames_limit  the limit of an answer is `max_completion_tokens`
    left_out       fields that are not sent
    """

    renames_limit: bool = False
    left_out: tuple[str, ...] = ()

    def of(self, fields: Mapping[str, Any], *, is_chat: bool = True) -> dict[str, Any]:
        """The fields of a request in this form. Requests that continue a text always call their limit `max_tokens`."""
        names = {LIMIT: NEW_LIMIT} if self.renames_limit and is_chat else {}
        return {names.get(name, name): value for name, value in fields.items() if name not in self.left_out}

    def without(self, refusal: str, fields: Mapping[str, Any]) -> "RequestForm | None":
        """The form after a refusal of `fields`; `None` if the refusal names no field that can change."""
        sent = {name for name in fields if name in SPELLINGS and name not in self.left_out}
        if self.renames_limit:
            sent.discard(LIMIT)
        places = {
            name: match.start() for name in sent if (match := re.search(SPELLINGS[name], refusal, re.IGNORECASE))
        }
        if not places:
            return None
        name = "top_p" if "top_p" in places and fields["top_p"] == 1 else min(places, key=lambda name: places[name])
        return replace(self, renames_limit=True) if name == LIMIT else replace(self, left_out=(*self.left_out, name))

    def notes(self) -> Sequence[str]:
        """The differences for a reader. Each ends a sentence that begins with the endpoint."""
        effects = {
            "temperature": "takes no temperature, so it draws its answers as it likes",
            "top_p": "takes no top_p",
            "seed": "takes no seed, so another sweep draws other answers",
            "stop": "takes no stop strings, so its texts are cut at them here",
        }
        renamed = [f"wants {NEW_LIMIT}, so its reasoning counts towards the limit"] if self.renames_limit else []
        return [*renamed, *(effects[name] for name in self.left_out)]


def refusal_text(error: "openai.APIStatusError") -> str:
    """An endpoint's words on a request that it refuses: the parameter and the message, or the whole body."""
    body = error.body
    if isinstance(body, Mapping) and isinstance(body.get("message"), str):
        return f"{body.get('param') or ''} {body['message']}"
    return json.dumps(body) if body is not None else str(error)


def ask_a_token(
    client: "openai.OpenAI", model: str, form: RequestForm, *, tokens: int = 1, **fields: Any
) -> "ChatCompletion | None":
    """The answer to the smallest request that an endpoint's engine must compute; `None` where it says that a token was
    too little for an answer."""
    import openai

    request = form.of({LIMIT: tokens, **fields})
    try:
        answer: ChatCompletion = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "1"}], **request
        )
        return answer
    except openai.BadRequestError as error:
        if ENDED_EARLY.search(refusal_text(error)):
            return None
        raise


def learn_form(
    client: "openai.OpenAI", model: str, form: RequestForm, **fields: Any
) -> tuple[RequestForm, "ChatCompletion | None"]:
    """The form in which an endpoint takes `fields`, and its answer. Raises the endpoint's error if the error names no
    field."""
    import openai

    tokens = 1
    for _ in range(MOST_CHANGES):
        try:
            return form, ask_a_token(client, model, form, tokens=tokens, **fields)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            refusal = refusal_text(error)
            least = LEAST.search(refusal) if re.search(SPELLINGS[LIMIT], refusal, re.IGNORECASE) else None
            if least is not None and int(least[1]) > tokens:
                tokens = int(least[1])
                continue
            changed = form.without(refusal, {LIMIT: tokens, **fields})
            if changed is None:
                raise
            form = changed
    return form, ask_a_token(client, model, form, tokens=tokens, **fields)
