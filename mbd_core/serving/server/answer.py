"""The answer to one API request, from the engine's steps: whole, or as server-sent events."""

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.calls.answer_reader import AnswerReader
from mbd_core.calls.reader import TextPiece
from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.request import FinishReason, Output, Request
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.replies import Reply, ReplyChoice, frame_fields
from mbd_core.serving.api.shapes import (
    AnswerCall,
    AnswerFunction,
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
    details        the requested fields on tokens, beside their text
    reader         makes a request's reader, if the answers may have calls or thoughts
    echoes         the text before each choice's own text, if any
    frame_texts    the text of each token, if frames are requested
    resumable      whether each commit of a stream ends with a `ResumePlace`
    usage          the events with the usage: none, an extra last event, or each event and the extra event
    """

    streamed: bool = False
    logprobs: Sequence[ChoiceLogprobs] | None = None
    details: TokenDetails = TokenDetails()
    reader: Callable[[Request], AnswerReader] | None = None
    echoes: Sequence[str] = ()
    frame_texts: TokenTexts | None = None
    resumable: bool = False
    usage: Literal["none", "last", "each"] = "none"


def add_calls(calls: list[AnswerCall], deltas: Sequence[Mapping[str, Any]]) -> None:
    """Adds OpenAI's deltas of calls to the calls so far."""
    for delta in deltas:
        function = delta["function"]
        if delta["index"] == len(calls):
            own: AnswerFunction = {"name": function["name"], "arguments": function["arguments"]}
            calls.append({"id": delta["id"], "type": delta["type"], "function": own})
        else:
            calls[delta["index"]]["function"]["arguments"] += function["arguments"]


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
        self._readers = [None if parts.reader is None else parts.reader(r) for r in stream.requests]
        self._echoes = list(parts.echoes) or [""] * len(stream.requests)
        self._num_tokens = [len(request.committed) for request in stream.requests]  # sent so far, per choice

    def close(self) -> None:
        """Aborts the unfinished requests."""
        if self._watch is not None:
            self._watch.on_close()
        self._stream.close()
        self._on_close()

    async def whole(self, on_step: Callable[[TextStep, str], None] = lambda step, content: None) -> Completion:
        """The whole answer in one object, with its choices in the order of the requests.

        Calls `on_step` with each step and its content.
        """
        texts = {r.request_id: echo for r, echo in zip(self._stream.requests, self._echoes, strict=True)}
        calls: dict[str, list[AnswerCall]] = {r.request_id: [] for r in self._stream.requests}
        index = {r.request_id: i for i, r in enumerate(self._stream.requests)}
        reasoning = dict.fromkeys(index, "")
        outputs: dict[str, Output] = {}
        weights: list[tuple[int, int]] = []
        async for step in self._steps:
            i = index[step.request_id]
            parts = [step] if self._readers[i] is None else step.by_tokens()  # to count the tokens of thoughts
            pieces = [self._read(i, part) for part in parts]
            content = "".join(piece.content for piece in pieces)
            on_step(step, content)
            texts[step.request_id] += content
            reasoning[step.request_id] += "".join(piece.reasoning for piece in pieces)
            for piece in pieces:
                add_calls(calls[step.request_id], piece.calls)
            if step.output is not None:
                outputs[step.request_id] = step.output
                weights.append(step.weights)
        ordered = [outputs[request_id] for request_id in texts]
        choices = [
            ReplyChoice(
                text=self._details.text(text, output.tokens, echo=self._echoes[i]),
                calls=calls[request.request_id],
                reasoning=reasoning[request.request_id],
                reason=self._reason(i, output.finish_reason),
                stop_reason=output.stop_reason,
                logprobs=self._logprobs_of(i, output.piece),
                details=self._details.of_prompt(request.prompt) | self._details.of_output(output),
            )
            for i, (request, text, output) in enumerate(
                zip(self._stream.requests, texts.values(), ordered, strict=True)
            )
        ]
        return self._reply.full(choices, [o.counts for o in ordered], weights, self._num_reasoning)

    def _read(self, index: int, part: TextStep) -> TextPiece:
        """Content, thoughts and calls in the next part of a choice's text."""
        reader = self._readers[index]
        if reader is None:
            return TextPiece(content=part.text)
        return reader.push(part.text, ends=part.output is not None, num_tokens=len(part.piece))

    def _reason(self, index: int, reason: FinishReason) -> EndReason:
        """Why a choice ended, once its text is read."""
        reader = self._readers[index]
        return reason if reason == "abort" or reader is None or not reader.num_calls else "tool_calls"

    @property
    def _num_reasoning(self) -> int:
        """Tokens of thoughts so far, in all choices."""
        return sum(reader.num_reasoning_tokens for reader in self._readers if reader is not None)

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
            yield [reply.usage_chunk([counts[i] for i in sorted(counts)], weights, self._num_reasoning)]

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
        piece = self._read(index, step)
        if not (piece.content or piece.reasoning or piece.calls or logprobs or (details and (step.piece or ends))):
            return None
        return self._chunk(
            index,
            text=piece.content,
            reasoning=piece.reasoning,
            calls=piece.calls,
            logprobs=logprobs,
            details=details,
        )

    def _logprobs_of(self, index: int, piece: Piece) -> Logprobs:
        return None if self._logprobs is None else self._logprobs[index].add(piece)
