"""A model in this process, without Ray and HTTP: `LLM("tiny-mbd").chat("...")`. Its answers equal the endpoint's."""

import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack, overload

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from jobs.api.answer_stream import AnswerStream
from jobs.api.answers import Answer, Trace
from jobs.api.call_options import unknown
from jobs.api.keywords import ChatKeywords, Keywords, Settings, json_body, split_keywords, split_settings
from jobs.api.session import RequestKind, Session, TracedReply
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.folder import read_folder
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import METHODS, NAMED_METHODS
from mbd_core.engine.config import EngineConfig
from mbd_core.json_text import merge_fields
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import decoding_defaults
from mbd_core.storage.models import check_url_weights, fetch_model

GivenMessage = Mapping[str, Any]
BAR_SECONDS = 1.0  # until a progress bar is shown
SEED_LIMIT = 2**63  # seeds are signed 64-bit: -2**63 <= seed < 2**63


class LLM:
    """A model folder with its engine. Threads may share it; `close()` or `with` frees its memory.

    model     a shipped model's name, a model folder, or its URL
    settings  the default decoding: a method's name (`method="single"`) and fields of `DecodingConfig`
              (`buffer_size=4`); and fields of `EngineConfig` (`max_rows=32`)

    Raises `ValueError`, in the words of the commands, for a model or a setting that is not possible.
    """

    def __init__(self, model: str | Path, **settings: Unpack[Settings]) -> None:
        self.settings = dict(settings)
        args, self._fields, self.decoding = read_settings(model, settings)
        self._name = args.served_name
        session = Session(args)
        self._session = session
        self._end = weakref.finalize(self, session.close)
        try:
            session.check(self.decoding)
        except ValueError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"LLM({', '.join([repr(self._name), *(f'{k}={v!r}' for k, v in self.settings.items())])})"

    def close(self) -> None:
        """End the engine and its threads, as the end of the process does; running requests raise `RuntimeError`."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM holds an engine and cannot be pickled; make one in each process")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._session.service.loaded.tokenizer

    def describe(self) -> str:
        """One line on the backend, its capacity and its decoding."""
        return self._session.service.describe()

    # -- chats --------------------------------------------------------------------------------------------------

    @overload
    def chat(
        self,
        messages: str | list[GivenMessage],
        *,
        n: None = None,
        trace: bool = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Answer: ...
    @overload
    def chat(
        self, messages: str | list[GivenMessage], *, n: int, trace: bool = False, **keywords: Unpack[ChatKeywords]
    ) -> list[Answer]: ...
    @overload
    def chat(
        self,
        messages: list[str] | list[list[GivenMessage]],
        *,
        n: None = None,
        trace: bool = False,
        **keywords: Unpack[ChatKeywords],
    ) -> list[Answer]: ...
    @overload
    def chat(
        self,
        messages: list[str] | list[list[GivenMessage]],
        *,
        n: int,
        trace: bool = False,
        **keywords: Unpack[ChatKeywords],
    ) -> list[list[Answer]]: ...
    def chat(
        self, messages: Any, *, n: int | None = None, trace: bool = False, **keywords: Unpack[ChatKeywords]
    ) -> Any:
        """The answer to a text or to the messages of a chat. A list of texts or chats gives a list of answers.

        n         with a number, each text or chat gets a list of `n` answers
        trace     record how each answer's blocks fill
        keywords  fields of the endpoint's chat request, `schema`, `regex` or `choice`, and fields of the decoding;
                  `use_tqdm` for a progress bar, which several answers have at a terminal

        Raises `ValueError`, in the endpoint's words, for a request that is not possible; then no answer is decoded.
        """
        several = _conversations(messages)
        given = [messages] if several is None else several
        answers = self._answers(ChatRequest, "messages", list(map(_turns, given)), n, trace, keywords)
        return answers[0] if several is None else answers

    # -- prompts ------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompts: str | list[int], *, n: None = None, trace: bool = False, **keywords: Unpack[Keywords]
    ) -> Answer: ...
    @overload
    def generate(
        self, prompts: str | list[int], *, n: int, trace: bool = False, **keywords: Unpack[Keywords]
    ) -> list[Answer]: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        *,
        n: None = None,
        trace: bool = False,
        **keywords: Unpack[Keywords],
    ) -> list[Answer]: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        *,
        n: int,
        trace: bool = False,
        **keywords: Unpack[Keywords],
    ) -> list[list[Answer]]: ...
    def generate(
        self, prompts: Any, *, n: int | None = None, trace: bool = False, **keywords: Unpack[Keywords]
    ) -> Any:
        """The continuation of a prompt (text or token ids), without a chat template. Several prompts give a list.

        The arguments are those of `chat`. The engine decodes the prompts of a list together, `max_rows` at a time.
        """
        several = _several_prompts(prompts)
        given = [_prompt(prompts)] if several is None else several
        answers = self._answers(CompletionRequest, "prompt", given, n, trace, keywords)
        return answers[0] if several is None else answers

    # -- streams ------------------------------------------------------------------------------------------------

    def stream(
        self, messages: str | Sequence[GivenMessage], *, trace: bool = False, **keywords: Unpack[ChatKeywords]
    ) -> AnswerStream:
        """The pieces of an answer's text as they are committed. The arguments are those of `chat`, for one text or one
        chat.

        After the last piece `stream.answer` is the whole answer. `close()`, the end of a `with` block, or the loss of
        the last reference aborts an unfinished stream.
        """
        if _conversations(messages) is not None:
            raise ValueError("stream takes one text or one chat; call chat for several")
        if keywords.get("n") is not None:
            raise ValueError("stream gives one answer; call chat with n for several")
        body = {**self._body(ChatRequest, keywords), "messages": _turns(messages)}
        answer_of = partial(self._answer, prompt=body["messages"])
        return AnswerStream(self._session, body, trace=trace, answer_of=answer_of)

    # -- requests -----------------------------------------------------------------------------------------------

    def _body(self, kind: RequestKind, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """A request's body without its prompt."""
        given = {name: value for name, value in keywords.items() if value is not None}
        method = given.pop("method", None)
        body, own = split_keywords(kind, given)
        fields = _with_method(method, {}) if method is not None else self._fields
        decoding = body.get("decoding", {})
        if not isinstance(decoding, Mapping):
            raise ValueError(f"decoding={decoding!r} must be an object of decoding fields")
        fields = merge_fields(merge_fields(fields, decoding), own)
        body |= {"model": self._name, "return_token_ids": True}
        return body | ({"decoding": fields} if fields else {})

    def _answers(
        self,
        kind: RequestKind,
        field: str,
        prompts: list[Any],
        n: int | None,
        trace: bool,
        keywords: Mapping[str, Any],
    ) -> list[Any]:
        """For each prompt its answer, or, with `n`, the list of its `n` answers."""
        fields = dict(keywords)
        use_tqdm = fields.pop("use_tqdm", None)
        body = self._body(kind, fields)
        number = 1 if n is None else n
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"n={n!r} must be a whole number of at least 1")
        seed = body.get("seed")
        if seed is None and number > 1:
            seed = secrets.randbits(32)
        if trace:
            body |= {"stream": True, "frames": True}
        bodies = [
            {**body, field: prompt, **({"seed": _nth_seed(seed, i)} if seed is not None else {})}
            for prompt in prompts
            for i in range(number)
        ]
        if not bodies:
            return []
        is_hidden = None if use_tqdm is None and len(bodies) > 1 else not use_tqdm  # None shows it at a terminal
        with tqdm(total=len(bodies), unit="answer", disable=is_hidden, delay=BAR_SECONDS) as bar:
            work = self._session.ask_all(
                kind, [*map(json_body, bodies)], n=number, field=field, trace=trace, on_answer=bar.update
            )
            replies = self._session.call(work)
        answers = [self._answer(reply, body[field]) for reply, body in zip(replies, bodies, strict=True)]
        return answers if n is None else [answers[start : start + n] for start in range(0, len(answers), n)]

    def _answer(self, reply: TracedReply, prompt: Any) -> Answer:
        answer, loaded = Answer.of(reply.completion), self._session.service.loaded
        draft = reply.completion["mbd"].get("draft_model")
        trace = Trace.of(
            reply.frames,
            name=self._name if draft is None else f"{self._name} (drafts of {draft})",
            note=_note(prompt),
            prompt=answer.prompt_tokens,
            num_tokens=len(answer.tokens),
            ended=answer.finish_reason != "length",
            decode=partial(decode_text, loaded.tokenizer, special=True),
        )
        return replace(answer, trace=trace)


def read_settings(
    model: str | Path, settings: Mapping[str, Any]
) -> tuple[EndpointArgs, dict[str, Any], DecodingConfig]:
    """The arguments of the engine of `LLM(model, **settings)`, the decoding fields that it was given, and its default
    decoding. No weights are read.

    Raises `ValueError`, as `LLM` does, for a model or a setting that is not possible.
    """
    own, engine_fields, model_fields = split_settings({k: v for k, v in settings.items() if k != "method"})
    given = _with_method(settings.get("method"), own)
    engine = EngineConfig(**engine_fields)
    check_url_weights([str(model)], engine.url_weights)
    args = EndpointArgs(
        model=fetch_model(str(model), url_weights=engine.url_weights), engine=engine, **model_fields
    ).checked()
    folder = read_folder(Path(args.model))
    block_size = engine.block_size or folder.config.block_size
    decoding = decoding_config(decoding_defaults(folder, engine), given, block_size=block_size)
    slots = max(args.engine.num_slots, decoding.buffer_size)
    return replace(args, engine=replace(args.engine, buffer_size=slots)), given, decoding


def _with_method(method: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The named method's fields, overridden by `fields`."""
    if method is None:
        return dict(fields)
    if not isinstance(method, str):
        raise ValueError(f"method={method!r} must be a method's name: {', '.join(METHODS)}")
    if method not in NAMED_METHODS:
        raise unknown("method", method, METHODS)
    return merge_fields(NAMED_METHODS[method], fields)


def _nth_seed(seed: Any, number: int) -> Any:
    """The seed of choice `number`, by the endpoint's rule.

    An invalid seed is returned unchanged; the endpoint refuses it.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        return seed
    if not -SEED_LIMIT <= seed < SEED_LIMIT:
        return seed
    return (seed + number + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT


def _conversations(messages: Any) -> list[Any] | None:
    """The members of a list of texts or chats; `None` for one text or one chat."""
    if isinstance(messages, list | tuple) and messages and not isinstance(messages[0], Mapping):
        return list(messages)
    return None


def _turns(messages: Any) -> list[Any]:
    """The messages of a text or a chat."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        return [messages]
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise ValueError(
            f"messages are of type {type(messages).__name__}; give a text, or a list of messages as "
            '{"role": "user", "content": "..."}'
        )
    return list(messages)


def _several_prompts(prompts: Any) -> list[Any] | None:
    """The members of a list of prompts; `None` for one text or one list of token ids."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, list | tuple) and (not prompts or not isinstance(prompts[0], int)):
        return list(map(_prompt, prompts))
    return None


def _prompt(prompt: Any) -> Any:
    """A text or a list of token ids, which the endpoint accepts. Raises `ValueError` for other types."""
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(prompt, str) or (isinstance(prompt, list | tuple) and not any(isinstance(i, str) for i in prompt)):
        return prompt
    raise ValueError(f"a prompt is of type {type(prompt).__name__}; give a text, or a list of token ids")


def _note(prompt: Any) -> str:
    """A prompt as the page of a trace shows it."""
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if prompt and isinstance(prompt[-1], Mapping) else {}
    return str(last.get("content") or "")
