"""What a reply says of tokens beside their text: their ids, and for rollouts when each was accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.decoding.rollout import Rollout
from mbd_core.serving.openai_requests import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class TokenDetails:
    """The fields that a choice gets where the client asked for them, empty otherwise.

    ids    `token_ids`, and of the prompt `prompt_token_ids`
    steps  `rollout`: the step map and log-probabilities of these tokens, and at the end of the terminal block's rest
    """

    ids: bool = False
    steps: bool = False

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

    def of_prompt(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The field for a prompt."""
        return {"prompt_token_ids": list(prompt)} if self.ids else {}


def token_details(asked: GenerationRequest) -> TokenDetails:
    return TokenDetails(ids=bool(asked.return_token_ids), steps=bool(asked.return_step_map))
