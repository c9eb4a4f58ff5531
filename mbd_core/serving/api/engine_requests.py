"""From a parsed API request to the engine's requests, one per choice."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from mbd_core.calls.form import CallForm
from mbd_core.calls.thoughts import Thoughts
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import PENALTIES
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.schemas import GrammarRefused
from mbd_core.engine.sequences.admission import Admission, RequestRefused
from mbd_core.serving.api.chat_ids import share_of_tools
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.fields import TemplateTokens
from mbd_core.serving.api.requests import MAX_TOKENS_DEFAULT, ChatRequest, GenerationRequest
from mbd_core.serving.text.committed import CommittedText, DecodeTokens, StopStrings


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
        why = "a canvas is not filled from left to right, so its answer can only begin anew"
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
        why += share_of_tools(api_request.shown_tools if isinstance(api_request, ChatRequest) else ())
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
                raise FieldError("resume", "the answer has ended: its tokens contain a stop string")
        texts.append(text)
    return texts
