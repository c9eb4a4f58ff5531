"""The answer to one API request, from the engine's steps: whole, or as server-sent events."""

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.checkpoint.chat import CallRule
from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.request import FinishReason, Output, Request
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.replies import Reply, ReplyChoice, frame_fields
from mbd_core.serving.api.shapes import (
    AnswerCall,
    Chunk,
    Completion,
    EndReason,
    Error,
    FrameEvent,
    Logprobs,
    ResumePlace,
)
from mbd_core.serving.server.measures import RequestWatch
from mbd_core.serving.server.text_stream import TextStep, TextStream
from mbd_core.serving.server.token_details import TokenDetails
from mbd_core.serving.text.committed import CallReader, TextPiece
from mbd_core.serving.text.logprobs import ChoiceLogprobs, TokenTexts

DONE = "data: [DONE]\n\n"


def event(value: Chunk | FrameEvent | Error) -> str:
    """One server-sent event; a frame has a type of its own."""
    kind = "event: frame\n" if "frame" in value else ""
    return f"{kind}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _place(request: Request, reply_id: str, num_tokens: int, num_forwards: int) -> ResumePlace:
    """The place after a choice's first `num_tokens` tokens; `num_forwards` is its forwards on this server."""
    place: ResumePlace = {"id": reply_id, "num_tokens": num_tokens, "forwards": request.first_forward + num_forwards}
    if request.sampling.temperature:
        place["seed"] = request.sampling.seed
    return place


@dataclass(frozen=True, kw_only=True)
class AnswerParts:
    """The parts of its answer that a client requested.

    streamed       whether the client wants `events()` instead of `whole()`
    logprobs       one writer of log-probabilities per choice, if requested
    details        reports on tokens beside their text
    calls          the rule for calls in the answers, if they may have calls
    echoes         the text before each choice's own text, if any
    frame_texts    the text of each token, if frames are requested
    resumable      whether each commit of a stream ends with a `ResumePlace`
    usage          the events with the usage: none, an extra last event, or each event and the extra one
    """

    streamed: bool = False
    logprobs: Sequence[ChoiceLogprobs] | None = None
    details: TokenDetails = TokenDetails()
    calls: CallRule | None = None
    echoes: Sequence[str] = ()
    frame_texts: TokenTexts | None = None
    resumable: bool = False
    usage: Literal["none", "last", "each"] = "none"


class ServedAnswer:
    """The tokens committed to one API request, in the shapes of `reply`; the caller must `close()` it.

    `watch` measures the steps; each `close()` calls `on_close`.
    """

    def __init__(
        self,
        reply: Reply,
        stream: TextStream,
        parts: AnswerParts = AnswerParts(),
        *,
        watch: RequestWatch | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.streamed, self._watch, self._on_close = parts.streamed, watch, on_close
        self._steps: AsyncIterable[TextStep] = stream if watch is None else watch.steps(stream)
        self._reply, self._stream, self._logprobs, self._usage = reply, stream, parts.logprobs, parts.usage
        self._details, self._texts, self._resumable = parts.details, parts.frame_texts, parts.resumable
        is_form = parts.calls is not None and parts.calls.form is not None
        self._calls = [None if parts.calls is None else CallReader(form=is_form) for _ in stream.requests]
        self._echoes = list(parts.echoes) or [""] * len(stream.requests)
        self._num_tokens = [len(request.committed) for request in stream.requests]  # sent so far, per choice

    def close(self) -> None:
        """Aborts the unfinished requests."""
        if self._watch is not None:
            self._watch.on_close()
        self._stream.close()
        self._on_close()

    async def whole(self, on_step: Callable[[TextStep], None] = lambda step: None) -> Completion:
        """The whole answer in one object, with its choices in the order of the requests.

        Calls `on_step` with each step.
        """
        texts = {r.request_id: echo for r, echo in zip(self._stream.requests, self._echoes, strict=True)}
        outputs: dict[str, Output] = {}
        weights: list[tuple[int, int]] = []
        async for step in self._steps:
            on_step(step)
            texts[step.request_id] += step.text
            if step.output is not None:
                outputs[step.request_id] = step.output
                weights.append(step.weights)
        ordered = [outputs[request_id] for request_id in texts]
        choices = [
            self._choice(
                index,
                self._details.text(text, output.tokens, echo=self._echoes[index]),
                reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=self._logprobs_of(index, output.piece),
                details=self._details.of_prompt(request.prompt) | self._details.of_output(output),
            )
            for index, (request, text, output) in enumerate(
                zip(self._stream.requests, texts.values(), ordered, strict=True)
            )
        ]
        return self._reply.full(choices, [o.counts for o in ordered], weights)

    def _choice(self, index: int, text: str, *, reason: FinishReason, **fields: Any) -> ReplyChoice:
        piece = self._read(index, text, ends=True)
        calls: list[AnswerCall] = [
            {"id": call["id"], "type": call["type"], "function": call["function"]} for call in piece.calls
        ]
        return ReplyChoice(text=piece.content, calls=calls, reason=self._reason(index, reason), **fields)

    def _read(self, index: int, text: str, *, ends: bool) -> TextPiece:
        """Content and calls in the next piece of a choice's text."""
        reader = self._calls[index]
        return TextPiece(content=text) if reader is None else reader.push(text, ends=ends)

    def _reason(self, index: int, reason: FinishReason) -> EndReason:
        """Why a choice ended, once its text is read."""
        reader = self._calls[index]
        return reason if reason == "abort" or reader is None or not reader.num_calls else "tool_calls"

    async def events(self, on_failure: Callable[[Exception], ApiError]) -> AsyncIterator[str]:
        """The answer as server-sent events. The last object before `[DONE]` carries `mbd`.

        The HTTP status is sent before the first event, so a failure becomes the last event, with the error that
        `on_failure` returns, and no `[DONE]` follows.
        """
        async for group in self.event_groups(on_failure):
            for text in group:
                yield text

    async def event_groups(self, on_failure: Callable[[Exception], ApiError]) -> AsyncIterator[list[str]]:
        """The events, grouped by step; each token's text is its own event."""
        try:
            async for chunks in self.chunks():
                yield list(map(event, chunks))
            yield [DONE]
        except Exception as error:
            yield [event(on_failure(error).body)]

    async def chunks(self) -> AsyncIterator[list[Chunk | FrameEvent]]:
        """The objects of the events, grouped by step."""
        reply = self._reply
        index = {r.request_id: i for i, r in enumerate(self._stream.requests)}
        counts: dict[int, Counts] = {}
        num_tokens = self._num_tokens
        weights: list[tuple[int, int]] = []
        for i, (request, echo) in enumerate(zip(self._stream.requests, self._echoes, strict=True)):
            prompt = self._details.of_prompt(request.prompt)
            if reply.chat or prompt or echo:
                yield [self._chunk(i, text=echo, first=True, details=prompt)]
        async for step in self._steps:
            i = index[step.request_id]
            chunks = []
            for part in step.by_tokens():
                num_tokens[i] += len(part.piece)
                if (chunk := self._chunk_of(i, part)) is not None:
                    chunks.append(chunk)
            if self._resumable and step.piece and step.output is None:
                place = _place(self._stream.requests[i], reply.id, num_tokens[i], step.num_forwards)
                chunks[-1]["choices"][0]["resume"] = place
            objects: list[Chunk | FrameEvent] = [*chunks]
            if step.frame is not None and self._texts is not None:
                objects.insert(0, reply.frame(frame_fields(step.frame, i, self._texts)))
            if step.output is not None:
                counts[i] = step.output.counts
                weights.append(step.weights)
                end = self._details.of_answer(step.output.tokens)
                reason = self._reason(i, step.output.finish_reason)
                last = self._chunk(i, reason=reason, stop_reason=step.output.stop_reason, details=end)
                if len(counts) == len(index) and self._usage == "none":
                    last["mbd"] = reply.measures([counts[i] for i in sorted(counts)], weights)
                objects.append(last)
            yield objects
        if self._usage != "none":
            yield [reply.usage_chunk([counts[i] for i in sorted(counts)], weights)]

    def _chunk(self, index: int, **fields: Any) -> Chunk:
        chunk = self._reply.chunk(index, **fields)
        if self._usage == "none":
            return chunk
        usage = None if self._usage == "last" else self._reply.usage_so_far(self._stream.requests, self._num_tokens)
        return {**chunk, "usage": usage}

    def _chunk_of(self, index: int, step: TextStep) -> Chunk | None:
        """The chunk of a part of a step, `None` if the part has no content."""
        ends = step.output is not None
        logprobs = self._logprobs_of(index, step.piece) if step.piece else None
        details = self._details.of_step(step)
        piece = self._read(index, step.text, ends=ends)
        if not (piece.content or piece.calls or logprobs or (details and (step.piece or ends))):
            return None
        return self._chunk(index, text=piece.content, calls=piece.calls, logprobs=logprobs, details=details)

    def _logprobs_of(self, index: int, piece: Piece) -> Logprobs:
        return None if self._logprobs is None else self._logprobs[index].add(piece)
