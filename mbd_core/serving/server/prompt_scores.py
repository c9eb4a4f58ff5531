"""The log-probabilities of a prompt's own tokens (`echo` with `logprobs`), with which harnesses compare answers."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.api.replies import Reply, ReplyChoice
from mbd_core.serving.api.requests import CompletionRequest
from mbd_core.serving.api.shapes import Completion, TokenFields
from mbd_core.serving.server.answer import AnswerParts, ServedAnswer
from mbd_core.serving.server.text_stream import TextStep, TextStream
from mbd_core.serving.text.committed import DecodeTokens
from mbd_core.serving.text.logprobs import LEAST_LOGPROB, ChoiceLogprobs, TokenTexts
from mbd_core.serving.tokens.served_model import ServedModel


def score_requests(
    api_request: CompletionRequest, prompts: Sequence[Sequence[int]], model: ServedModel, *, seed: int
) -> list[Request]:
    """A scored request for each prompt; each ends with one generated token.

    Raises `FieldError`.
    """
    requests: list[Request] = []
    group, limits = uuid.uuid4().hex, model.limits.admission
    slots = min(2, limits.buffer_size)  # with two slots, the next block's first forward stores the block before it
    decoding = DecodingConfig(block_size=model.limits.block_size, buffer_size=slots, tau_add=1.0, tau_m2t=1.0)
    for prompt in prompts:
        if len(prompt) >= limits.max_length:
            why = f"{len(prompt)} tokens leave no room for one more; the limit is {limits.max_length} in all"
            raise FieldError("prompt", why, code="context_length_exceeded")
        unknown = next((t for t in prompt if not 0 <= t < limits.model.vocab_size), None)
        if unknown is not None:
            why = f"token {unknown} lies outside the vocabulary of {limits.model.vocab_size} tokens"
            raise FieldError("prompt", why)
        request = Request(
            request_id=f"{group}-{len(requests)}",
            prompt=tuple(prompt[:1]),
            template=(*prompt[1:], None),
            max_tokens=max(1, len(prompt)),
            decoding=decoding,
            sampling=api_request.samplings(seed)[0],
            ignore_eos=True,
            scored=True,
            adapter=model.adapter,
        )
        try:
            limits.check(request)
        except RequestRefused as error:
            field = "logprobs" if error.field == "template" else "prompt"
            raise FieldError(field, str(error), code=error.code) from None
        requests.append(request)
    return requests


class PromptScores(ServedAnswer):
    """The scores of prompts, as one object in the shape of a completion."""

    def __init__(
        self,
        api_request: CompletionRequest,
        reply: Reply,
        stream: TextStream,
        parts: AnswerParts,
        *,
        texts: TokenTexts,
        decode: DecodeTokens,
        **ends: Any,
    ) -> None:
        """`texts` and `decode` give the text of tokens. `ends` are further arguments of `ServedAnswer`."""
        super().__init__(reply, stream, parts, **ends)
        self._api_request, self._token_texts, self._decode = api_request, texts, decode

    async def whole(self, on_step: Callable[[TextStep, str], None] = lambda step, content: None) -> Completion:
        outputs: dict[str, Output] = {}
        weights: list[tuple[int, int]] = []
        async for step in self._steps:
            on_step(step, step.text)
            if step.output is not None:
                outputs[step.request_id] = step.output
                weights.append(step.weights)
        ordered = [outputs[request.request_id] for request in self._stream.requests]
        if any(output.finish_reason == "abort" for output in ordered):
            message = "the request was aborted before all of its prompt was scored; ask again"
            raise ApiError(503, message, code="aborted", headers={"Retry-After": "1"})
        parts = zip(self._stream.requests, ordered, self._echoes, strict=True)
        # In a thread: building the entries of thousands of tokens would block the event loop.
        choices = [await asyncio.to_thread(self._choice_of, *each) for each in parts]
        counts = [
            replace(o.counts, num_prompt_tokens=len(o.tokens), num_tokens=self._api_request.max_tokens or 0)
            for o in ordered
        ]
        return self._reply.full(choices, counts, weights)

    def _choice_of(self, request: Request, output: Output, echo: str) -> ReplyChoice:
        number = len(output.tokens) - 1 + (self._api_request.max_tokens or 0)  # number of requested scores
        tokens, scores = (*request.prompt, *output.tokens[:number]), output.scores[:number]
        entries = ChoiceLogprobs(self._token_texts, self._decode, chat=False)
        columns = entries.columns(tokens, (0.0, *(score.logprob for score in scores)))
        columns["token_logprobs"][0] = None  # the first token has no context
        if self._api_request.logprobs:
            likeliest = [entries.name(s.likeliest) for s in scores]
            values = [max(s.likeliest_logprob, LEAST_LOGPROB) for s in scores]
            columns["top_logprobs"] = [None, *({name: v} for name, v in zip(likeliest, values, strict=True))]
        prompt = (*request.prompt, *output.tokens[:-1])
        generated = self._decode(list(tokens)).removeprefix(self._decode(list(prompt)))
        details: TokenFields = self._details.of_prompt(prompt)
        if self._api_request.return_token_ids:
            details["token_ids"] = list(tokens[len(prompt) :])
        return ReplyChoice(text=echo + generated, reason="length", logprobs=columns, details=details)
