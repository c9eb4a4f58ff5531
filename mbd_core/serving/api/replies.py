"""The JSON objects of an answer: the whole answer, the chunks of a stream, and frames."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.slots import Frame, FrameSlot
from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.api.shapes import (
    AnswerCall,
    AnswerMessage,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    EndReason,
    FrameEvent,
    FrameFields,
    Logprobs,
    Measures,
    SlotFields,
    TokenFields,
    Usage,
    UsageSoFar,
)
from mbd_core.serving.text.logprobs import TokenTexts


def frame_fields(frame: Frame, index: int, texts: TokenTexts) -> FrameFields:
    """The frame of choice `index`; `texts` gives the text of each token."""
    slots = [_slot_fields(slot, texts) for slot in frame.slots]
    return {
        "index": index,
        "forward": frame.forward,
        "position": frame.position,
        "num_slots": frame.num_slots,
        "slots": slots,
    }


def _slot_fields(slot: FrameSlot, texts: TokenTexts) -> SlotFields:
    def read(tokens: Sequence[int | None]) -> list[str | None]:
        return [None if token is None else texts(token)[0] for token in tokens]

    fields: SlotFields = {
        "state": cast(Literal["ACTIVE", "TO_CACHE", "IN_CACHE"], slot.state),
        "tokens": list(slot.tokens),
        "texts": read(slot.tokens),
        "accepted": list(slot.accepted),
        "edited": list(slot.edited),
    }
    if slot.verdict is not None:
        fields["drafted"], fields["drafted_texts"] = list(slot.verdict.drafted), read(slot.verdict.drafted)
        fields["judged"], fields["confirmed"] = slot.verdict.judged, list(slot.verdict.confirmed)
        fields["refused"] = list(slot.verdict.refused)
    return fields


@dataclass(frozen=True, kw_only=True)
class ReplyChoice:
    """One finished answer with its thoughts and its `calls` of functions."""

    text: str
    reasoning: str = ""
    reason: EndReason
    stop_reason: int | str | None = None
    calls: Sequence[AnswerCall] = ()
    logprobs: Logprobs = None
    details: TokenFields = field(default_factory=lambda: TokenFields())


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The fields that all JSON objects of one answer share; its methods build the objects.

    Choices are numbered prompt by prompt, `num_choices` for each. `seed` is set if tokens are sampled. `speed` is set
    if the request has a speed: the speed of the chosen point of the model's front. `draft_model` is set if another
    model drafts. `notes` names fields without effect. The methods' argument `counts` has the counts of each choice, in
    order.
    """

    id: str
    created: int
    model: str
    chat: bool
    num_choices: int = 1
    seed: int | None = None
    speed: float | None = None
    draft_model: str | None = None
    notes: Sequence[str] = ()

    def full(
        self,
        choices: Sequence[ReplyChoice],
        counts: Sequence[Counts],
        weights: Sequence[tuple[int, int]],
        num_reasoning: int = 0,
    ) -> Completion:
        """The whole answer in one object."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self.usage(counts, num_reasoning),
            "mbd": self.measures(counts, weights),
        }

    def _choice(self, index: int, choice: ReplyChoice) -> Choice:
        if not self.chat:
            return {
                "index": index,
                "text": choice.text,
                "logprobs": choice.logprobs,
                "finish_reason": choice.reason,
                "stop_reason": choice.stop_reason,
                **choice.details,
            }
        message: AnswerMessage = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": list(choice.calls)}
        return {
            "index": index,
            "message": message,
            "logprobs": choice.logprobs,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
            **choice.details,
        }

    def chunk(
        self,
        index: int,
        *,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[dict[str, Any]] = (),
        first: bool = False,
        reason: EndReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Logprobs = None,
        details: TokenFields | None = None,
    ) -> Chunk:
        """One streamed chunk of choice `index`: its beginning, some text or parts of calls, or its end."""
        end: TokenFields = details or {}
        if reason is not None:
            end = {"stop_reason": stop_reason, **end}
        if not self.chat:
            return self._chunk([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **end}])
        delta: Delta = {"role": "assistant", "content": ""} if first else {}
        if reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if reason is None and not first and (text or not (calls or reasoning)):
            delta["content"] = text
        if calls:
            delta["tool_calls"] = list(calls)
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **end}])

    def usage_chunk(
        self, counts: Sequence[Counts], weights: Sequence[tuple[int, int]], num_reasoning: int = 0
    ) -> Chunk:
        """The extra last chunk for `stream_options.include_usage`."""
        return {**self._chunk([]), "usage": self.usage(counts, num_reasoning), "mbd": self.measures(counts, weights)}

    def _chunk(self, choices: list[ChunkChoice]) -> Chunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def frame(self, fields: FrameFields) -> FrameEvent:
        """The data of a provisional event."""
        if self.draft_model is not None:
            fields = {**fields, "draft_model": self.draft_model}
        return {
            "id": self.id,
            "object": "mbd.frame",
            "created": self.created,
            "model": self.model,
            "choices": [],
            "frame": fields,
        }

    def usage(self, counts: Sequence[Counts], num_reasoning: int = 0) -> Usage:
        """OpenAI's token counts. A prompt counts once, with its first choice's cached tokens."""
        prompts = counts[:: self.num_choices]
        prompt, completion = sum(c.num_prompt_tokens for c in prompts), sum(c.num_tokens for c in counts)
        usage: Usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in prompts)},
        }
        if num_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def usage_so_far(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> UsageSoFar:
        """The counts of a running stream; `num_tokens` are the tokens of each choice so far."""
        prompt, completion = sum(len(r.prompt) for r in requests[:: self.num_choices]), sum(num_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def measures(self, counts: Sequence[Counts], weights: Sequence[tuple[int, int]]) -> Measures:
        """The `mbd` field; `weights` are the `StepOutput.weights` of each choice's last step."""
        total = sum(counts, Counts())
        oldest, newest = min(w[0] for w in weights), max(w[1] for w in weights)
        shares = {**asdict(total), "tpf": total.tpf, "oldest_weights": oldest, "newest_weights": newest}
        measures = cast(Measures, shares)  # it has each count of `Counts`; a test checks this
        if self.seed is not None:
            measures["seed"] = self.seed
        if self.speed is not None:
            measures["speed"] = self.speed
        if self.draft_model is not None:
            measures["draft_model"] = self.draft_model
        if self.notes:
            measures["notes"] = list(self.notes)
        return measures
