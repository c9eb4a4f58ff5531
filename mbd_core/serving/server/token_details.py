"""A reply's details on tokens beside their text: ids, and for rollouts the forward that decided each token."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mbd_core.decoding.answers.piece import ForwardExperts, Piece
from mbd_core.decoding.blocks.request import Output
from mbd_core.serving.api.fields import TemplateTokens
from mbd_core.serving.api.requests import GenerationRequest
from mbd_core.serving.api.shapes import (
    ExpertFields,
    RolloutFields,
    TokenFields,
)
from mbd_core.serving.server.text_stream import TextStep
from mbd_core.serving.text.committed import DecodeTokens


@dataclass(frozen=True, kw_only=True)
class TokenDetails:
    """Builds the requested fields of a choice; without a request for them they are empty.

    ids    whether to give `token_ids` and `prompt_token_ids`
    steps  whether to give `rollout`: step map and log-probabilities; an answer's last `rollout` has those of the last
           block's discarded rest too
    holes  a function that gives the text of an answer and the texts in its template's holes
    """

    ids: bool = False
    steps: bool = False
    holes: Callable[[Sequence[int]], tuple[str, list[str]]] | None = None

    def of_step(self, step: TextStep) -> TokenFields:
        """The fields for a step of a choice."""
        return self._of(step.piece.tokens, step.piece, None if step.output is None else step.tail)

    def of_output(self, output: Output) -> TokenFields:
        """The fields for a whole choice."""
        return self._of(output.tokens, output.piece, output.tail, output.experts) | self.of_answer(output.tokens)

    def _of(
        self, tokens: Sequence[int], piece: Piece, tail: Piece | None, experts: Sequence[ForwardExperts] = ()
    ) -> TokenFields:
        fields: TokenFields = {"token_ids": list(tokens)} if self.ids else {}
        if self.steps and piece.steps is not None:
            steps: RolloutFields = {"step_map": list(piece.steps), "logprobs": list(piece.logprobs or ())}
            if tail is not None:
                steps["terminal"] = {
                    "token_ids": list(tail.tokens),
                    "step_map": list(tail.steps or ()),
                    "logprobs": list(tail.logprobs or ()),
                }
            if experts:
                steps["experts"] = list(map(_expert_fields, experts))
            fields["rollout"] = steps
        return fields

    def of_answer(self, tokens: Sequence[int]) -> TokenFields:
        """The field for all tokens of a choice."""
        return {} if self.holes is None else {"holes": self.holes(tokens)[1]}

    def text(self, text: str, tokens: Sequence[int], *, echo: str) -> str:
        """A whole choice's text.

        With a template it is `echo`, then the template with its holes filled. Its fixed text is exactly as given.
        """
        return text if self.holes is None else echo + self.holes(tokens)[0]

    def of_prompt(self, prompt: Sequence[int]) -> TokenFields:
        """The field for a prompt."""
        return {"prompt_token_ids": list(prompt)} if self.ids else {}


def _expert_fields(record: ForwardExperts) -> ExpertFields:
    columns = record.columns()
    ids = b64encode(columns["ids"]).decode()
    return {"forward": record.forward, "start": record.start, "shape": columns["shape"], "ids": ids}


def token_details(
    api_request: GenerationRequest, template: TemplateTokens | None, decode: DecodeTokens
) -> TokenDetails:
    return TokenDetails(
        ids=bool(api_request.return_token_ids or api_request.resumable),
        steps=bool(api_request.return_step_map),
        holes=None if template is None else partial(template.texts, decode=decode),
    )
