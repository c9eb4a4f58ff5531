"""OpenAI's reply shapes: the whole answer, its streamed chunks, usage, and the `mbd` field."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mbd_core.decoding.request import Counts
from mbd_core.serving.frame_events import FrameEvent, FrameFields


@dataclass(frozen=True, kw_only=True)
class ReplyChoice:
    """One finished answer, its `calls` of functions, `logprobs` in the shape of its route, where asked for, and
    `details`, fields of its tokens and its prompt."""

    text: str
    reason: str
    calls: Sequence[dict[str, Any]] = ()
    logprobs: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The fields that all JSON objects of one answer share, and those objects' shapes.

    Choices are numbered prompt by prompt, `num_choices` of each. `seed` is set where tokens are drawn, `speed` where
    the client chose a point of the model's front: the speed at which it stands. Counts are those of all choices, in
    their order.
    """

    id: str
    created: int
    model: str
    chat: bool
    num_choices: int = 1
    seed: int | None = None
    speed: float | None = None

    def _object(self, kind: str, **rest: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **rest}

    def full(
        self, choices: Sequence[ReplyChoice], counts: Sequence[Counts], weights: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """The whole answer in one object."""
        objects = [
            {"index": index, **self._content(c), "logprobs": c.logprobs, "finish_reason": c.reason, **c.details}
            for index, c in enumerate(choices)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, choices=objects, usage=self.usage(counts), mbd=self.measures(counts, weights))

    def _content(self, choice: ReplyChoice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": list(choice.calls)}
        return {"message": message}

    def chunk(
        self,
        index: int,
        *,
        text: str = "",
        calls: Sequence[dict[str, Any]] = (),
        first: bool = False,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One streamed chunk of choice `index`: its beginning, some text or parts of calls, or its end."""
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
            if reason is None and not first and (text or not calls):
                delta["content"] = text
            if calls:
                delta["tool_calls"] = list(calls)
            choice: dict[str, Any] = {"index": index, "delta": delta}
        else:
            choice = {"index": index, "text": text}
        choice |= {"logprobs": logprobs, "finish_reason": reason, **(details or {})}
        return self._object(self._chunk_kind, choices=[choice])

    def usage_chunk(self, counts: Sequence[Counts], weights: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The extra last chunk for `stream_options.include_usage`."""
        return self._object(self._chunk_kind, choices=[], usage=self.usage(counts), mbd=self.measures(counts, weights))

    def frame(self, fields: FrameFields) -> dict[str, Any]:
        """The data of a provisional event."""
        return FrameEvent(id=self.id, created=self.created, model=self.model, frame=fields).model_dump()

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def usage(self, counts: Sequence[Counts]) -> dict[str, Any]:
        """OpenAI's token counts: each prompt once, with its first choice's cached tokens, and all choices' tokens."""
        prompts = counts[:: self.num_choices]
        prompt, completion = sum(c.num_prompt_tokens for c in prompts), sum(c.num_tokens for c in counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in prompts)},
        }

    def measures(self, counts: Sequence[Counts], weights: Sequence[tuple[int, int]]) -> dict[str, float]:
        """The `mbd` field: sums of the raw counts over all choices, tokens per forward as their ratio, seed, speed,
        the oldest and the newest weights that decoded any of them (`StepOutput.weights`)."""
        columns = [asdict(c) for c in counts]
        total = Counts(**{name: sum(c[name] for c in columns) for name in columns[0]})
        versions = {"oldest_weights": min(w[0] for w in weights), "newest_weights": max(w[1] for w in weights)}
        chosen = {name: value for name, value in (("seed", self.seed), ("speed", self.speed)) if value is not None}
        return {**asdict(total), "tpf": total.tpf, **versions, **chosen}
