"""What a reply says of tokens beside their text: their ids, and for rollouts when each was accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mbd_core.decoding.rollout import Rollout
from mbd_core.serving.committed_text import Decode
from mbd_core.serving.infilling import TemplateTokens
from mbd_core.serving.openai_requests import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class TokenDetails:
    """The fields that a choice gets where the client asked for them, empty otherwise.

    ids    `token_ids`, and of the prompt `prompt_token_ids`
    steps  `rollout`: the step map and log-probabilities of these tokens, and at the end of the terminal block's rest
    holes  of a template: the texts in its holes
    """

    ids: bool = False
    steps: bool = False
    holes: Callable[[Sequence[int]], tuple[str, list[str]]] | None = None

    def of(self, tokens: Sequence[int], rollout: Rollout | None, *, ends: bool) -> dict[str, Any]:
        """The fields for these tokens of a choice; `ends`: they are its last ones, or all of them."""
        fields: dict[str, Any] = {"token_ids": list(tokens)} if self.ids else {}
        if self.steps and rollout is not None:
            fields["rollout"] = {"step_map": list(rollout.steps), "logprobs": list(rollout.logprobs)}
            if ends:
                fields["rollout"]["terminal"] = {
                    "token_ids": list(rollout.tail_tokens),
                    "step_map": list(rollout.tail_steps),
                    "logprobs": list(rollout.tail_logprobs),
                }
        return fields

    def of_answer(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The field for all tokens of a choice."""
        return {} if self.holes is None else {"holes": self.holes(tokens)[1]}

    def text(self, text: str, tokens: Sequence[int], *, echo: str) -> str:
        """A whole choice's text: of a template `echo` and its parts, fixed ones exactly as the client gave them."""
        return text if self.holes is None else echo + self.holes(tokens)[0]

    def of_prompt(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The field for a prompt."""
        return {"prompt_token_ids": list(prompt)} if self.ids else {}


def token_details(asked: GenerationRequest, template: TemplateTokens | None, decode: Decode) -> TokenDetails:
    return TokenDetails(
        ids=bool(asked.return_token_ids or asked.resumable),
        steps=bool(asked.return_step_map),
        holes=None if template is None else partial(template.texts, decode=decode),
    )
