"""From a parsed API request to the engine's requests, one per choice; prompts are tokenised at a bounded cost."""

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from mbd_core.calls.form import CallForm
from mbd_core.calls.thoughts import Thoughts, thought_form
from mbd_core.checkpoint.chat import VariableRefused, chat_text, decode_text, unknown_variables
from mbd_core.checkpoint.literal_text import MaskedText, control_tokens, literal, token_ids
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import PENALTIES
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.schemas import GrammarRefused
from mbd_core.engine.sequences.admission import Admission, RequestRefused
from mbd_core.serving.api.chat_fields import TemplateFields, turns
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.fields import TemplateTokens
from mbd_core.serving.api.requests import (
    MAX_TOKENS_DEFAULT,
    ChatRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from mbd_core.serving.api.shapes import TokenIds, TokenizerInfo, TokenText
from mbd_core.serving.text.committed import CommittedText, DecodeTokens, StopStrings
from mbd_core.serving.tokens.served_model import ServedModel
from mbd_core.serving.tokens.stream import TooManyRequests


def engine_requests(
    api_request: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    *,
    decoding: DecodingConfig,
    seed: int,
    admission: Admission,
    adapter: str | None = None,
    template: TemplateTokens | None = None,
    call_form: CallForm | None = None,
    thoughts: Thoughts | None = None,
    added_tokens: Mapping[str, int] = MappingProxyType({}),
    default_max_tokens: int = MAX_TOKENS_DEFAULT,
) -> list[Request]:
    """The engine's requests in the order of the reply's choices: prompt by prompt, choice by choice. They share a
    `group`.

    `call_form` is the form of the model's calls, if the answers may have calls. `thoughts` may come before an answer.
    `added_tokens` are the tokenizer's added tokens by their texts. Raises `FieldError`.
    """
    samplings = api_request.samplings(seed)
    budget, grammar = api_request.budget, grammar_of(api_request, call_form, added_tokens, thoughts)
    if template is not None:
        budget = len(template.tokens)
    if template is not None or grammar is not None or samplings[0].penalises:
        decoding = _without_revision(decoding, api_request)
    if api_request.resumable and decoding.canvas is not None:
        why = "a canvas is not filled from left to right, its answer can only begin anew"
        raise FieldError("resumable", why, remedy="leave it out")
    requests: list[Request] = []
    group = uuid.uuid4().hex
    for prompt in prompts:
        request = Request(
            request_id=f"{group}-{len(requests)}",
            prompt=tuple(prompt),
            max_tokens=max(default_max_tokens, api_request.min_tokens or 0) if budget is None else budget,
            decoding=decoding,
            sampling=samplings[0],
            logprobs=api_request.wants_logprobs,
            rollout=bool(api_request.return_step_map),
            experts=bool(api_request.return_routed_experts),
            frames=bool(api_request.frames),
            adapter=adapter,
            grammar=grammar,
            template=() if template is None else template.tokens,
            ignore_eos=template is not None or bool(api_request.ignore_eos),
            min_tokens=api_request.min_tokens or 0,
            stop_token_ids=tuple(api_request.stop_token_ids or ()),
            top_logprobs=api_request.num_tops,
        )
        if budget is None:
            request = replace(request, max_tokens=admission.default_max_tokens(request))
        if api_request.resume is not None:
            committed, forwards = tuple(api_request.resume.token_ids), api_request.resume.forwards
            request = replace(request, committed=committed, first_forward=forwards)
        try:
            admission.check(request)  # for all choices: they differ only in their seeds
        except RequestRefused as error:
            raise _field_error(error, api_request, len(prompt), admission, templated=template is not None) from None
        first = len(requests)
        requests += [replace(request, request_id=f"{group}-{first + i}", sampling=s) for i, s in enumerate(samplings)]
    return requests


def grammar_of(
    api_request: GenerationRequest,
    call_form: CallForm | None,
    added_tokens: Mapping[str, int],
    thoughts: Thoughts | None = None,
) -> Grammar | None:
    """The grammar of the answers, with their thoughts. The parameters are those of `engine_requests`.

    Raises `FieldError`.
    """
    rule = api_request.call_rule if isinstance(api_request, ChatRequest) else None
    try:
        grammar = api_request.grammar if rule is None or call_form is None else rule.grammar(call_form, added_tokens)
        return grammar if grammar is None or thoughts is None else thoughts.before(grammar, added_tokens)
    except GrammarRefused as error:
        raise FieldError(api_request.grammar_field or "", str(error)) from None


def _without_revision(decoding: DecodingConfig, api_request: GenerationRequest) -> DecodingConfig:
    """Switches the model's default revision of filled tokens off, unless the request asks for revision.

    A revision would change fixed tokens, tokens that a grammar has accepted, and tokens that a penalty counts.
    """
    if {"t2t", "soft", "tau_stable"} & (api_request.decoding or {}).keys():
        return decoding
    return replace(decoding, t2t=None, soft=None, tau_stable=None)


def check_number(api_request: GenerationRequest, capacity: int) -> None:
    """Raise `FieldError` if there is no prompt, or if there are more choices than the server takes at once.

    The caller checks this before it tokenises.
    """
    if not api_request.num_prompts:
        raise FieldError(api_request.prompt_field, "no prompt was given")
    number = api_request.num_prompts * api_request.num_choices
    if number > capacity:
        field = api_request.prompt_field if api_request.num_prompts > capacity else "n"
        raise FieldError(field, f"{number} choices at once; this server takes at most {capacity}")


def _field_error(
    refused: RequestRefused,
    api_request: GenerationRequest,
    prompt_length: int,
    admission: Admission,
    *,
    templated: bool,
) -> Exception:
    """The engine's refusal as an API error that names the client's field."""
    fields = {
        "prompt": api_request.prompt_field,
        "committed": "resume",
        "max_tokens": api_request.budget_field,
        "decoding": "decoding" if api_request.speed is None else "speed",
        "rollout": "return_step_map",
        "experts": "return_routed_experts",
        "frames": "frames",
        "grammar": api_request.grammar_field,
        "template": "template",
        "top_logprobs": "top_logprobs" if isinstance(api_request, ChatRequest) else "logprobs",
        **{name: name for name in ("logit_bias", "stop_token_ids", "min_tokens", *PENALTIES)},
    }
    field, why = fields.get(refused.field), str(refused)
    if templated and field == api_request.budget_field:
        field = "template"
    elif api_request.budget is None and refused.code == "context_length_exceeded":
        field, why = api_request.prompt_field, f"{prompt_length} tokens leave no room to generate; "
        if admission.room(prompt_length):
            why += "decoding.canvas keeps them once for each of its lanes; shorten the prompt"
        else:
            why += f"the limit is {admission.max_length} in all"
        why += _share_of_tools(api_request.shown_tools if isinstance(api_request, ChatRequest) else ())
    return refused if field is None else FieldError(field, why, code=refused.code)


def committed_texts(
    requests: Sequence[Request], decode: DecodeTokens, stop: Sequence[str], thoughts: Thoughts | None = None
) -> list[CommittedText]:
    """The text state of each request after its `committed` tokens, which the client has already.

    Raises `FieldError` if the answer has ended within these tokens.
    """
    stops = StopStrings(stop)
    texts = []
    for request in requests:
        text = CommittedText(decode, stops, min_tokens=request.min_tokens, thoughts=thoughts)
        for token in request.committed:
            text.push(token)
            if text.stopped:
                raise FieldError("resume", "the answer has ended, a stop string is complete in its tokens")
        texts.append(text)
    return texts


# Prompts' texts to token ids at a bounded cost, off the event loop.
#
# Tokenising takes about a second per few hundred thousand characters. So a text that is too long is refused after its
# first part, and long texts have their own thread, so that no short text waits for them.

LONG = 20_000  # a request with more characters is long
MOST_LONG = 16  # long requests that may wait for their thread
PART = 8  # characters of the first part, per token of the limit; if the part fits, the next part is tried
GROWTH = 4  # each part is this many times as long as the last
MARGIN = 256  # tokens by which a part may exceed the limit, because it may end within a word

EncodeText = Callable[[str], list[int]]
T = TypeVar("T")


class TextTooLong(ValueError):
    """A text has too many tokens."""


def bounded_ids(encode: EncodeText, text: str, *, limit: int) -> list[int]:
    """The ids of `text`. Raises `TextTooLong` as soon as a part of it has more than about `limit` tokens."""
    end = PART * limit + MARGIN
    while end < len(text):
        if len(encode(text[:end])) > limit + MARGIN:
            raise TextTooLong(f"{len(text)} characters are more than {limit} tokens, which is the limit in all")
        end *= GROWTH
    return encode(text)


def text_ids(
    model: ServedModel, text: str | MaskedText, *, field: str, special: bool, parse_special: bool = False
) -> list[int]:
    """The ids of the text in `field`. `special` adds the tokenizer's special tokens around it.

    A control token's name in a client's text is plain text, unless `parse_special`; a chat's text is masked already.
    Raises `FieldError` for a text with far too many tokens. The engine refuses a text with slightly too many.
    """
    masked = text
    if isinstance(masked, str):
        masked = MaskedText(masked) if parse_special else literal(model.tokenizer, masked)

    def encode(part: str) -> list[int]:
        part_ids = token_ids(model.tokenizer, [MaskedText(part, masked.masking)], add_special_tokens=special)
        return part_ids[0]

    try:
        return bounded_ids(encode, masked.text, limit=model.limits.admission.max_length)
    except TextTooLong as error:
        raise FieldError(field, str(error), code="context_length_exceeded") from None


def chat_ids(
    model: ServedModel,
    turns: Sequence[Mapping[str, Any]],
    ending: TemplateFields,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    special: bool = False,
) -> list[int]:
    """The ids of a chat in the model's template. Raises the errors of `text_ids`, and the template's refusals.

    A turn's `token_ids` replace the ids of its content, unless they have thoughts before it or the template changes
    the content's text.
    """
    plain_turns = [{name: value for name, value in turn.items() if name != "token_ids"} for turn in turns]
    answers = {number: turn["token_ids"] for number, turn in enumerate(turns) if "token_ids" in turn}
    if answers and special:
        why = "are not taken where the tokenizer's special tokens stand around a chat"
        raise FieldError(f"messages.{min(answers)}.token_ids", why, remedy="leave add_special_tokens out")
    answers = {
        number: answer
        for number, answer in answers.items()
        if _spells(model, answer, str(plain_turns[number]["content"]), field=f"messages.{number}.token_ids")
    }
    try:
        render = partial(
            chat_text,
            model.tokenizer,
            tools=tools,
            answered=ending.add_generation_prompt is False,
            continues=bool(ending.continue_final_message),
            variables=ending.variables(partial(unknown_variables, model.tokenizer)),
            form_name=model.call_form,
        )
        text = render(plain_turns)
        pieces = _around_answers(render, plain_turns, sorted(answers), text) if answers else None
    except VariableRefused as error:
        raise FieldError("chat_template_kwargs", str(error)) from None
    except ValueError as error:
        raise FieldError("messages", str(error)) from None
    try:
        if pieces is None:
            return text_ids(model, text, field="messages", special=special)
        ids = text_ids(model, pieces[0], field="messages", special=False)
        for number, piece in zip(sorted(answers), pieces[1:], strict=True):
            ids += answers[number]
            ids += text_ids(model, piece, field="messages", special=False) if piece.text else []
    except FieldError as error:
        why = error.message.removeprefix("messages: ") + _share_of_tools(tools)
        raise FieldError("messages", why, code=error.code or "") from None
    return ids


def _share_of_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The end of an error message on a chat that is too long: the length of its tools."""
    if not tools:
        return ""
    length = len(json.dumps(tools, ensure_ascii=False))
    return f"; the {len(tools)} tools have {length} characters, so give fewer, or shorter descriptions"


ANSWER_PLACE = "\U0010fffe"  # a non-character, which no text has


def _spells(model: ServedModel, answer: Sequence[int], content: str, *, field: str) -> bool:
    """Whether the tokens `answer` spell this content alone; `False` if they have thoughts before it.

    Raises `FieldError` if they are not an answer with this content.
    """
    tokenizer = model.tokenizer
    unknown = next((t for t in answer if t >= len(tokenizer)), None)
    if unknown is not None:
        raise FieldError(field, f"is no token; the vocabulary has {len(tokenizer)}", value=unknown)
    controls, used = control_tokens(tokenizer), {*tokenizer.convert_ids_to_tokens(list(answer))}
    if not used & controls and decode_text(tokenizer, answer) == content:
        return True
    form = thought_form(tokenizer.get_chat_template() if tokenizer.chat_template else "")
    marks = () if form is None else (form.begin, form.end)
    if form is not None and all(any(mark.startswith(control) for mark in marks) for control in used & controls):
        text = decode_text(tokenizer, answer, special=True)
        if any(Thoughts(form, is_open=o).reader().push(text, ends=True)[1] == content for o in (False, True)):
            return False
    why = "are not the tokens of the content beside them, as an answer's token_ids are"
    raise FieldError(field, why, remedy="send both as they came, or leave token_ids out")


def _around_answers(
    render: Callable[..., MaskedText],
    turns: Sequence[Mapping[str, Any]],
    answered: Sequence[int],
    text: MaskedText,
) -> list[MaskedText] | None:
    """The texts before, between and after the answers of the turns `answered`.

    `None` if the template does not show each answer once, whole (except for surrounding whitespace) and in order.

    Whitespace that the template renders before a finished answer but not in the generation prompt is removed; the
    model never saw it.
    """
    if ANSWER_PLACE in text.text:
        return None
    marked = [dict(turn) for turn in turns]
    for number in answered:
        marked[number]["content"] = ANSWER_PLACE
    pieces = render(marked)
    parts = pieces.plain.split(ANSWER_PLACE)
    if len(parts) != len(answered) + 1:
        return None
    for shown in (str, str.strip):
        answers = [shown(str(turns[number]["content"])) for number in answered]
        if "".join(a + b for a, b in zip(parts, [*answers, ""], strict=True)) == text.plain:
            blanks = _blanks_before_answers(render)
            shown_parts = pieces.text.split(ANSWER_PLACE)
            before = [part.removesuffix(blanks) for part in shown_parts[:-1]]
            return [MaskedText(part, pieces.masking) for part in (*before, shown_parts[-1])]
    return None


def _blanks_before_answers(render: Callable[..., MaskedText]) -> str:
    """The whitespace that the template renders before a finished answer but not at the end of a generation prompt."""
    question = {"role": "user", "content": "x"}
    try:
        begin = render([question], answered=False, continues=False).text
        shown = render([question, {"role": "assistant", "content": ANSWER_PLACE}], answered=True, continues=False).text
    except ValueError:  # the template refuses these turns
        return ""
    between = shown.partition(ANSWER_PLACE)[0].removeprefix(begin)
    return between if between.isspace() else ""


# The tokenizer over HTTP.


def tokenize(api_request: TokenizeRequest, model: ServedModel) -> TokenIds:
    """The ids of a prompt with this text. Raises the errors of `text_ids` and `chat_ids`."""
    if api_request.prompt is not None:
        special, parsed = api_request.add_special_tokens is not False, bool(api_request.parse_special)
        ids = text_ids(model, api_request.prompt, field="prompt", special=special, parse_special=parsed)
    else:
        special = bool(api_request.add_special_tokens)
        ids = chat_ids(
            model, turns(api_request.messages or ()), api_request, tools=api_request.shown_tools, special=special
        )
    return {
        "count": len(ids),
        "max_model_len": model.limits.admission.max_length,
        "tokens": ids,
        "token_strs": model.tokenizer.convert_ids_to_tokens(ids) if api_request.return_token_strs else None,
    }


def detokenize(api_request: DetokenizeRequest, tokenizer: PreTrainedTokenizerBase) -> TokenText:
    """The text of token ids, special tokens included; raises `FieldError` for an id that the vocabulary lacks."""
    unknown = next((t for t in api_request.tokens if t >= len(tokenizer)), None)
    if unknown is not None:
        raise FieldError("tokens", f"is no token; the vocabulary has {len(tokenizer)}", value=unknown)
    return {
        "prompt": tokenizer.decode(api_request.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    }


def tokenizer_info(tokenizer: PreTrainedTokenizerBase) -> TokenizerInfo:
    """The special tokens and the chat template, from which a client builds prompts."""
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": tokenizer.chat_template,
    }


class TokenizerThreads:
    """Two threads that tokenise: one for short texts, one for long ones.

    After its first call, which sets it up, a fast tokenizer may be used in both threads at once.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")
        self._num_long = 0

    async def run(self, call: Callable[[], T], *, characters: int) -> T:
        """The result of `call`, which tokenises `characters` characters. Raises `TooManyRequests` if many long texts
        wait."""
        loop = asyncio.get_running_loop()
        if characters <= LONG:
            return await loop.run_in_executor(self._short, call)
        if self._num_long >= MOST_LONG:
            raise TooManyRequests(f"{MOST_LONG} requests with long prompts are being read; try again later")
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._long, call)
        finally:
            self._num_long -= 1

    def shutdown(self) -> None:
        """End the threads, after the running calls."""
        self._short.shutdown()
        self._long.shutdown(cancel_futures=True)
