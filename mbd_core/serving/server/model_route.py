"""One model's part of serving: from a parsed request to the engines' requests, and from tokens to an answer."""

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

from mbd_core.calls.answer_reader import AnswerReader
from mbd_core.calls.form import CallForm
from mbd_core.calls.reader import CallReader
from mbd_core.calls.rule import CallRule
from mbd_core.calls.thoughts import Thoughts, thought_form, thoughts_continued
from mbd_core.checkpoint.chat import call_form, decode_text, prompt_thoughts, unknown_variables
from mbd_core.checkpoint.literal_text import control_tokens
from mbd_core.checkpoint.tokenizer import grammars_of
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.methods import SpeedPoint
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.sequences.admission import RequestRefused, compile_guide, penalties_refused
from mbd_core.serving.api.chat_ids import chat_ids
from mbd_core.serving.api.engine_requests import committed_texts, engine_requests, grammar_of
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.fields import Template, TemplateTokens, template_tokens
from mbd_core.serving.api.replies import Reply
from mbd_core.serving.api.requests import (
    MAX_TOKENS_DEFAULT,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from mbd_core.serving.api.tokenizing import text_ids
from mbd_core.serving.server.answer import AnswerParts, ServedAnswer
from mbd_core.serving.server.measures import RequestWatch
from mbd_core.serving.server.prompt_scores import PromptScores, score_requests
from mbd_core.serving.server.text_stream import ClientPlaces, OpenChoices, TextStream
from mbd_core.serving.server.token_details import token_details
from mbd_core.serving.text.committed import CommittedText, DecodeTokens
from mbd_core.serving.text.logprobs import ChoiceLogprobs, TokenTexts
from mbd_core.serving.tokens.served_model import GrammarCompiler, ServedModel
from mbd_core.serving.tokens.stream import TimeLimit
from mbd_core.serving.tokens.thought_budget import BudgetedSource, ThoughtBudget, ThoughtWatch

ApiRequest = CompletionRequest | ChatRequest

PLACES = 2  # choices that one client may have at the engines, per batch row


@dataclass(frozen=True, kw_only=True)
class TokenizedBody:
    """A tokenised API request.

    api_request  the request with the model's defaults filled in
    seed         seed of its first choice
    requests     one for each prompt and choice
    template     the tokens of its template, if any
    thoughts     the thoughts that the answers may begin with
    budget       the budget of these thoughts, if any
    echoes       the text before each choice's own text, if any
    """

    api_request: ApiRequest
    seed: int
    requests: list[Request]
    template: TemplateTokens | None = None
    thoughts: Thoughts | None = None
    budget: ThoughtBudget | None = None
    echoes: Sequence[str] = ()

    @property
    def call_rule(self) -> CallRule | None:
        """The rule for answers with calls."""
        return self.api_request.call_rule if isinstance(self.api_request, ChatRequest) else None


def scored(api_request: ApiRequest) -> TypeGuard[CompletionRequest]:
    """Whether it asks for the log-probabilities of its prompts."""
    return isinstance(api_request, CompletionRequest) and api_request.scores_prompt


def first_seed(api_request: ApiRequest) -> int:
    """The seed of the first choice; random if tokens are sampled without a given seed.

    A given seed counts at temperature 0, too: some methods draw noise there (`verify`, `renoise`).
    """
    if api_request.resume is not None and api_request.resume.seed is not None:
        return api_request.resume.seed
    if api_request.seed is not None:
        return api_request.seed
    return secrets.randbits(32) if api_request.draws else 0


class ModelRoute:
    """Turns parsed requests into the requests of one model's engines, and tokens into answers."""

    def __init__(self, model: ServedModel, log: logging.Logger) -> None:
        """Call the constructor in the tokenizer's thread."""
        self.model, self._log = model, log
        self.choices = OpenChoices(model.capacity)
        self.places = ClientPlaces(PLACES * model.num_engines * model.limits.rows)
        model.tokenizer.encode("")  # its first call sets padding and truncation, which two threads must not do at once
        self.decode = partial(decode_text, model.tokenizer)
        self.decode_all = partial(decode_text, model.tokenizer, special=True)
        self.token_texts = TokenTexts(model.tokenizer)
        self._thought_form = thought_form(model.tokenizer.get_chat_template() if model.tokenizer.chat_template else "")
        self._hidden = self._hidden_tokens()
        self._edit_noted = False
        grammars = grammars_of(model.tokenizer, model.limits.admission.model)
        self._compile = GrammarCompiler(partial(compile_guide, grammars))

    def tokenized(self, api_request: ApiRequest, *, seed: int) -> "TokenizedBody":
        """Tokenise the prompts, and make one request per prompt and choice. Call it in the tokenizer's thread."""
        form = self._call_form(api_request)
        read_prompts = self._read(api_request)
        echoes = api_request.echoes(self.decode) if isinstance(api_request, CompletionRequest) else []
        if scored(api_request):
            requests = score_requests(api_request, read_prompts(), self.model, seed=seed)
            return TokenizedBody(api_request=api_request, seed=seed, requests=requests, echoes=echoes)
        template = None
        if isinstance(api_request, CompletionRequest) and api_request.template is not None:
            template = self._template(api_request.template, parse_special=bool(api_request.parse_special))
        prompts = read_prompts()
        thoughts = self._thoughts(api_request, prompts)
        requests = engine_requests(
            api_request,
            prompts,
            decoding=self._decoding(api_request),
            seed=seed,
            admission=self.model.limits.admission,
            adapter=self.model.adapter,
            template=template,
            call_form=form,
            thoughts=thoughts,
            added_tokens=self.model.tokenizer.get_added_vocab(),
            default_max_tokens=int(self.model.limits.sampling.get("max_tokens", MAX_TOKENS_DEFAULT)),
        )
        return TokenizedBody(
            api_request=api_request,
            seed=seed,
            requests=requests,
            template=template,
            thoughts=thoughts,
            budget=self._budget(api_request, thoughts, requests[0].decoding),
            echoes=echoes,
        )

    def texts(self, body: "TokenizedBody") -> list[CommittedText]:
        """The text state of each request. For a resumed stream, call it in the tokenizer's thread."""
        return committed_texts(
            body.requests, self._decode_of(body), body.api_request.stop_strings, thoughts=body.thoughts
        )

    def _decode_of(self, body: "TokenizedBody") -> DecodeTokens:
        """The decoder that keeps the marks of calls and thoughts, even where the marks are control tokens."""
        if body.call_rule is not None:
            return self.decode_all
        return self._decode_with_marks if body.thoughts is not None and self._hidden else self.decode

    def _decode_with_marks(self, tokens: list[int]) -> str:
        return self.decode_all([token for token in tokens if token not in self._hidden])

    def _hidden_tokens(self) -> frozenset[int]:
        """The control tokens other than marks of thoughts; empty if no mark is a control token."""
        form, tokenizer = self._thought_form, self.model.tokenizer
        marks = () if form is None else (form.begin, form.end)
        controls = control_tokens(tokenizer)
        if not any(control in mark for mark in marks for control in controls):
            return frozenset()
        shown = {control for control in controls if any(mark.startswith(control) for mark in marks)}
        return frozenset(tokenizer.convert_tokens_to_ids(sorted(controls - shown)))

    def _thoughts(self, api_request: ApiRequest, prompts: Sequence[Sequence[int]]) -> Thoughts | None:
        """The thoughts that the answers to a chat may begin with."""
        if self._thought_form is None or not isinstance(api_request, ChatRequest) or not prompts:
            return None
        last = str(api_request.turns[-1]["content"]) if api_request.continue_final_message else ""
        if last.strip():
            return thoughts_continued(last, self._thought_form)
        return prompt_thoughts(self.model.tokenizer, prompts[0])

    def _budget(
        self, api_request: ApiRequest, thoughts: Thoughts | None, decoding: DecodingConfig
    ) -> ThoughtBudget | None:
        """The budget of an answer's thoughts; `None` if it has none, or if they are not bounded."""
        number = api_request.thought_budget if isinstance(api_request, ChatRequest) else None
        if number is None or thoughts is None or decoding.canvas is not None:
            return None
        decode = self._decode_with_marks if self._hidden else self.decode
        return ThoughtBudget(
            num_tokens=number,
            end=tuple(self.model.tokenizer.encode(thoughts.form.end, add_special_tokens=False)),
            watch=lambda: ThoughtWatch(CommittedText(decode), thoughts.reader()),
        )

    def _budget_notes(self, api_request: ChatRequest) -> list[str]:
        """Why a budget of thoughts has no effect, if so."""
        if api_request.thought_budget is None:
            return []
        if self._thought_form is None:
            return [f"{api_request.thought_budget_field} has no effect: the chat template knows no thoughts"]
        if self._decoding(api_request).canvas is not None:
            return [f"{api_request.thought_budget_field} has no effect: a canvas is not filled from left to right"]
        return []

    async def open(
        self, body: "TokenizedBody", texts: Sequence[CommittedText], *, client: str, limit: TimeLimit
    ) -> TextStream:
        """The stream of the body's requests, once the engines accepted them.

        Raises the errors of `TextStream.open`.
        """
        source = self.model.source if body.budget is None else BudgetedSource(self.model.source, body.budget)
        with self.choices.opening(client, len(body.requests)):
            stream = await TextStream.open(
                source,
                body.requests,
                texts=texts,
                key=client,
                places=self.places,
                limit=limit,
                waits=self.model.may_grow,
            )
            self.choices.add(client, stream)
        return stream

    def answer(
        self, body: "TokenizedBody", stream: TextStream, *, watch: RequestWatch, on_close: Callable[[], None]
    ) -> ServedAnswer:
        """The answer in the form that the client requested, over the steps of `stream`."""
        api_request, reply = body.api_request, self._reply(body)
        details = token_details(api_request, body.template, self.decode)
        if scored(api_request):
            parts = AnswerParts(details=details, echoes=body.echoes)
            ends = {"watch": watch, "on_close": on_close}
            return PromptScores(api_request, reply, stream, parts, texts=self.token_texts, decode=self.decode, **ends)
        parts = AnswerParts(
            streamed=bool(api_request.stream),
            logprobs=self._logprobs(body) if api_request.wants_logprobs else None,
            details=details,
            reader=self._reader_of(body),
            echoes=() if api_request.resume else body.echoes,
            frame_texts=self.token_texts if api_request.frames else None,
            resumable=bool(api_request.resumable),
            usage=api_request.usage_in_stream,
        )
        return ServedAnswer(reply, stream, parts, watch=watch, on_close=on_close)

    def _reply(self, body: "TokenizedBody") -> Reply:
        api_request, chat = body.api_request, isinstance(body.api_request, ChatRequest)
        new_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        rule = body.requests[0].decoding.verify
        return Reply(
            id=new_id if api_request.resume is None else api_request.resume.id,
            created=int(time.time()),
            model=api_request.model,
            chat=chat,
            num_choices=api_request.num_choices,
            seed=body.seed if api_request.draws else None,
            speed=None if api_request.speed is None else self.point(api_request.speed)[0],
            draft_model=self.model.limits.draft_model if rule is not None and rule.draft_model else None,
            notes=self.notes(api_request),
        )

    def _logprobs(self, body: "TokenizedBody") -> list[ChoiceLogprobs]:
        chat = isinstance(body.api_request, ChatRequest)
        logprobs = [ChoiceLogprobs(self.token_texts, self.decode, chat=chat) for _ in body.requests]
        for choice, request in zip(logprobs, body.requests, strict=True):  # text_offset continues after these tokens
            begun = request.committed
            choice.add(Piece(tokens=begun, logprobs=(0.0,) * len(begun)))
        return logprobs

    def with_defaults(self, api_request: ApiRequest) -> ApiRequest:
        """The request with the model's default sampling for missing fields, except a penalty that the decoding
        refuses. The scoring of a prompt takes no defaults."""
        if isinstance(api_request, CompletionRequest) and api_request.scores_prompt:
            return api_request
        defaults = {name: value for name, value in self.model.limits.sampling.items() if name != "max_tokens"}
        if "repetition_penalty" in defaults and penalties_refused(self._decoding(api_request)):
            del defaults["repetition_penalty"]
        absent = {name: value for name, value in defaults.items() if getattr(api_request, name) is None}
        return api_request.model_copy(update=absent) if absent else api_request

    def _read(self, api_request: ApiRequest) -> Callable[[], list[list[int]]]:
        if isinstance(api_request, ChatRequest):
            return partial(self._chat_prompts, api_request)
        return partial(self._plain_prompts, api_request)

    def _template(self, parts: Template, *, parse_special: bool) -> TemplateTokens:
        encode = partial(text_ids, self.model, field="template", special=False, parse_special=parse_special)
        return template_tokens(parts, encode, limit=self.model.limits.admission.max_length)

    def stop(self) -> None:
        """End the threads that compile grammars."""
        self._compile.stop()

    async def check_grammar(self, api_request: GenerationRequest, requests: list[Request]) -> None:
        """Raise `ApiError` (400), which names the field, for a grammar that the engines do not support."""
        try:
            await self._compile(min(requests, key=lambda r: r.max_tokens))
        except RequestRefused as error:
            raise FieldError(api_request.grammar_field or "", str(error), code=error.code) from None

    async def check_long_form(self, api_request: GenerationRequest) -> None:
        """`check_grammar` for a request with a too long prompt: a bad grammar is reported first."""
        grammar = grammar_of(api_request, self._call_form(api_request), self.model.tokenizer.get_added_vocab())
        if grammar is not None:
            length = self.model.limits.admission.max_length
            decoding = self._decoding(api_request)
            request = Request(request_id="", prompt=(0,), max_tokens=length, decoding=decoding, grammar=grammar)
            await self.check_grammar(api_request, [request])

    def _plain_prompts(self, api_request: CompletionRequest) -> list[list[int]]:
        encode = partial(
            text_ids, self.model, field="prompt", special=True, parse_special=bool(api_request.parse_special)
        )
        return [encode(p) if isinstance(p, str) else p for p in api_request.prompts]

    def _chat_prompts(self, api_request: ChatRequest) -> list[list[int]]:
        return [chat_ids(self.model, api_request.turns, api_request, tools=api_request.shown_tools)]

    def _call_form(self, api_request: GenerationRequest) -> CallForm | None:
        """The form of the model's calls, for a request whose answers may have calls.

        Raises `FieldError` if the chat template shows calls in a form that is not known.
        """
        if not isinstance(api_request, ChatRequest) or api_request.call_rule is None:
            return None
        try:
            return call_form(self.model.tokenizer, self.model.call_form)
        except ValueError as error:
            raise FieldError("tools", str(error)) from None

    def _reader_of(self, body: "TokenizedBody") -> Callable[[Request], AnswerReader] | None:
        """Makes an answer's reader. The reader of a resumed answer has already read its first tokens."""
        rule, form, thoughts = body.call_rule, self._call_form(body.api_request), body.thoughts
        if form is None and thoughts is None:
            return None

        def reader_of(request: Request) -> AnswerReader:
            calls = None
            if rule is not None and form is not None:
                calls = CallReader(form, dict(rule.functions), text_has_form=rule.text_schema is not None)
            reader = AnswerReader(None if thoughts is None else thoughts.reader(), calls)
            # The reader has got the text that the stream released for these tokens. Held-back text comes later.
            stops, begun = body.api_request.stop_strings, replace(request, committed=())
            [text] = committed_texts([begun], self._decode_of(body), stops, thoughts=thoughts)
            for token in request.committed:
                reader.push(text.push(token), ends=False)
            return reader

        return reader_of

    def notes(self, api_request: ApiRequest) -> list[str]:
        """A note for each accepted field without effect."""
        if not isinstance(api_request, ChatRequest):
            return api_request.notes
        unknown = partial(unknown_variables, self.model.tokenizer)
        return [*api_request.notes, *api_request.template_notes(unknown), *self._budget_notes(api_request)]

    def point(self, speed: float) -> tuple[float, SpeedPoint]:
        """The point of the model's speed front at `speed`: the speed of that point, and the point.

        Raises `ApiError` (400) if there is no front.
        """
        front = self.model.speed_front
        if front is None:
            raise FieldError(
                "speed",
                "this model has no measured front",
                remedy="measure one with jobs/eval_sweep.py and put it into the model's folder with "
                "jobs/report_sweep.py front, or give decoding",
            )
        return front.at(speed)

    def _decoding(self, api_request: GenerationRequest) -> DecodingConfig:
        if api_request.speed is not None:
            return self.model.decoding(self.point(api_request.speed)[1].decoding)
        try:
            decoding = self.model.decoding(api_request.decoding or {})
        except ValueError as error:
            raise FieldError("decoding", str(error)) from None
        note = None if self._edit_noted else self.model.edit_note(decoding)
        if note is not None:
            self._edit_noted = True
            self._log.warning(note)
        return decoding
