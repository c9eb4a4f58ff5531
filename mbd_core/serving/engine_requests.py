"""From a parsed API request to what the engine takes: one request for each prompt and choice, checked."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.grammar import Grammar, GrammarRefused
from mbd_core.decoding.request import Request
from mbd_core.engine.admission import Admission, RequestRefused
from mbd_core.serving.infilling import TemplateTokens
from mbd_core.serving.openai_errors import ApiError
from mbd_core.serving.openai_requests import MAX_TOKENS_DEFAULT, ChatRequest, GenerationRequest
from mbd_core.serving.stream_places import taken_up


def engine_requests(
    asked: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    *,
    prompt_field: str,
    decoding: DecodingConfig,
    seed: int,
    admission: Admission,
    adapter: str | None = None,
    template: TemplateTokens | None = None,
    added_tokens: Mapping[str, int] = MappingProxyType({}),
) -> list[Request]:
    """The engine's requests in the order of the reply's choices: prompt by prompt, choice by choice; one `group`.

    `prompt_field` is the field that the prompts came in, `added_tokens` what the tokenizer has as tokens beside its
    own pieces. Raises `ApiError` (400) naming the field that cannot be honoured.
    """
    samplings = asked.samplings(seed)
    budget, grammar = asked.budget, _grammar(asked, added_tokens)
    if template is not None:
        budget = len(template.tokens)
    if template is not None or grammar is not None:
        decoding = _without_revision(decoding, asked)
    if asked.resumable and decoding.canvas is not None:
        message = "resumable: a canvas is not filled from left to right, its answer can only begin anew; leave it out"
        raise ApiError(400, message, param="resumable", code="invalid_value")
    requests: list[Request] = []
    group = uuid.uuid4().hex
    for prompt in prompts:
        request = Request(
            request_id=f"{group}-{len(requests)}",
            prompt=tuple(prompt),
            max_tokens=MAX_TOKENS_DEFAULT if budget is None else budget,
            decoding=decoding,
            sampling=samplings[0],
            logprobs=asked.wants_logprobs,
            rollout=bool(asked.return_step_map),
            frames=bool(asked.frames),
            adapter=adapter,
            grammar=grammar,
            template=() if template is None else template.tokens,
            ignore_eos=template is not None,
        )
        if budget is None:
            request = replace(request, max_tokens=admission.default_max_tokens(request))
        if asked.resume is not None:
            request = taken_up(request, asked.resume)
        try:
            admission.check(request)  # the choices differ in what no check looks at
        except RequestRefused as error:
            raise _api_error(
                error, asked, len(prompt), admission, prompt_field=prompt_field, templated=template is not None
            ) from None
        first = len(requests)
        requests += [replace(request, request_id=f"{group}-{first + i}", sampling=s) for i, s in enumerate(samplings)]
    return requests


def _grammar(asked: GenerationRequest, added_tokens: Mapping[str, int]) -> Grammar | None:
    rule = asked.call_rule if isinstance(asked, ChatRequest) else None
    try:
        return asked.grammar if rule is None else rule.grammar(added_tokens)
    except GrammarRefused as error:
        field = asked.grammar_field
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from None


def _without_revision(decoding: DecodingConfig, asked: GenerationRequest) -> DecodingConfig:
    """The model's own revision of filled tokens is left out, where the request does not ask for it: it would change
    fixed tokens, and those that a grammar has accepted."""
    if {"t2t", "soft", "tau_stable"} & (asked.decoding or {}).keys():
        return decoding
    return replace(decoding, t2t=None, soft=None, tau_stable=None)


def check_number(num_prompts: int, num_choices: int, capacity: int, *, prompt_field: str) -> None:
    """Raise `ApiError` (400) where there is no prompt, or where there are more choices than the server takes at once.

    It is asked before anything is tokenised.
    """
    if not num_prompts:
        raise ApiError(400, f"{prompt_field}: no prompt was given", param=prompt_field, code="invalid_value")
    if num_prompts * num_choices > capacity:
        field = prompt_field if num_prompts > capacity else "n"
        message = f"{field}: {num_prompts * num_choices} choices at once; this server takes at most {capacity}"
        raise ApiError(400, message, param=field, code="invalid_value")


def _api_error(
    refused: RequestRefused,
    asked: GenerationRequest,
    prompt_length: int,
    admission: Admission,
    *,
    prompt_field: str,
    templated: bool,
) -> ApiError:
    """The engine's refusal in the words of the API: the field as the client named it."""
    fields = {
        "prompt": prompt_field,
        "committed": "resume",
        "max_tokens": asked.budget_field,
        "decoding": "decoding" if asked.speed is None else "speed",
        "rollout": "return_step_map",
        "frames": "frames",
        "grammar": asked.grammar_field,
        "template": "template",
    }
    param, message = fields.get(refused.field), str(refused)
    if templated and param == asked.budget_field:
        param = "template"
    elif asked.budget is None and refused.code == "context_length_exceeded":
        param, message = prompt_field, f"{prompt_length} tokens leave no room to generate; "
        if admission.room(prompt_length):
            message += "decoding.canvas keeps them once for each of its lanes; shorten the prompt"
        else:
            message += f"the limit is {admission.max_length} in all"
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=refused.code)
