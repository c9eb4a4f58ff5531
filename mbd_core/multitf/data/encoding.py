"""Conversations to samples of tokens: a prompt that is never masked, and a response that ends with EOS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mbd_core.checkpoint.chat import chat_text
from mbd_core.checkpoint.literal_text import MaskedText, masking_of, token_ids
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.data.chats import Chat, for_template, is_empty
from mbd_core.multitf.data.known_names import REASONING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedChat:
    """A conversation's tokens up to its last answer, and the answer's tokens, without the EOS that ends and fills it.

    `earlier` are [first token, end) of the trained answers before the last one.
    """

    prompt: list[int]
    response: list[int]
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.response]

    @property
    def num_trained(self) -> int:
        """The tokens of each trained answer with its context and its EOS, summed."""
        return len(self.tokens) + 1 + sum(stop + 1 for _, stop in self.earlier)


@dataclass(frozen=True)
class EncodedRow:
    """A conversation's samples. There are none if it is too long, or if it has the `error`."""

    samples: tuple[EncodedChat, ...] = ()
    is_too_long: bool = False
    error: str = ""


def fill_token(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int:
    """The EOS that ends and fills answers: the tokenizer's, if the model stops at it, else the model's first."""
    eos = tokenizer.eos_token_id
    return eos if eos in config.eos_token_ids else config.eos_token_ids[0]


def encode_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[tuple[str, Sequence[Mapping[str, Any]]]],
    *,
    eos_token_id: int,
) -> list[EncodedChat]:
    """The last answers of named conversations. Raises `ValueError` naming the first malformed conversation."""
    encoded_chats: list[EncodedChat] = []
    rows = encode_rows(tokenizer, [Chat(*chat) for chat in chats], eos_token_id=eos_token_id)
    for (name, _), row in zip(chats, rows, strict=True):
        if row.error:
            raise ValueError(f"{name}: {row.error}")
        encoded_chats.extend(row.samples)
    return encoded_chats


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    *,
    eos_token_id: int,
    every: bool = False,
    max_length: int | None = None,
) -> list[EncodedRow]:
    """Tokenises conversations that end with an answer, together.

    An answer's prompt is the template of all messages before it, with the beginning of an answer. It must be a prefix
    of the template of the conversation up to the answer's end, as text and as tokens. Control tokens that a message
    spells are text, in answers too.

    `every`: train all answers except a chat's `untrained`; an answer is a turn of the assistant after a user's or a
    tool's turn. An answer that is a prefix of the next answer's sample, token by token, is part of that sample. If the
    template shows earlier turns otherwise, the answer is a sample of its own. A conversation is too long if a sample
    has more than `max_length` tokens with its EOS. A conversation of more than twice that number by `least_tokens` is
    not tokenised at all.
    """
    rows: list[EncodedRow | None] = []
    texts: list[list[tuple[MaskedText, MaskedText]]] = []
    for chat in chats:
        row = None
        try:
            ends = _answer_ends(chat.messages, every=every, untrained=chat.untrained)
            shown_chat = for_template(tokenizer, chat)
            answers = [_texts(tokenizer, shown_chat, end) for end in ends]
        except ValueError as error:
            row, answers = EncodedRow(error=str(error)), []
        if answers and max_length is not None and least_tokens(tokenizer, answers[-1][1].text) > 2 * max_length:
            row, answers = EncodedRow(is_too_long=True), []
        rows.append(row)
        texts.append(answers)
    conversation_ids = _ids_or_errors(tokenizer, [conversation for answers in texts for _, conversation in answers])
    fits = [
        not isinstance(ids, str) and (max_length is None or len(ids) <= 2 * max_length) for ids in conversation_ids
    ]
    prompts = [prompt for answers in texts for prompt, _ in answers]
    prompt_ids = iter(_ids_or_errors(tokenizer, [text for text, fit in zip(prompts, fits, strict=True) if fit]))
    pairs = iter(
        [
            (next(prompt_ids) if fit else [], conversation)
            for fit, conversation in zip(fits, conversation_ids, strict=True)
        ]
    )
    return [
        _row(tokenizer, [next(pairs) for _ in answers], eos_token_id, max_length) if row is None else row
        for row, answers in zip(rows, texts, strict=True)
    ]


def _row(
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[tuple[list[int] | str, list[int] | str]],
    eos_token_id: int,
    max_length: int | None,
) -> EncodedRow:
    """The samples of a conversation's answers, each given by the tokens before it and the tokens up to its end."""
    chats: list[EncodedChat] = []
    for prompt, conversation in answers:
        for ids in (prompt, conversation):
            if isinstance(ids, str):
                return EncodedRow(error=ids)
        if max_length is not None and len(conversation) > 2 * max_length:
            return EncodedRow(is_too_long=True)
        if conversation[: len(prompt)] != prompt:
            return EncodedRow(
                error="the tokens of the whole conversation do not begin with its prompt's tokens: the answer merges "
                "with the prompt's end; change the chat template"
            )
        assert not isinstance(prompt, str) and not isinstance(conversation, str)
        response = _without_end(tokenizer, conversation[len(prompt) :], eos_token_id)
        if not response:
            return EncodedRow(error="its answer is empty")
        chats.append(EncodedChat(prompt, response))
    samples = _join_answers(chats)
    if max_length is not None and any(len(sample.tokens) + 1 > max_length for sample in samples):
        return EncodedRow(is_too_long=True)
    return EncodedRow(tuple(samples))


def _join_answers(answers: Sequence[EncodedChat]) -> list[EncodedChat]:
    """Joins answers into the next one's sample where they are its prefix."""
    samples: list[EncodedChat] = []
    for answer in answers:
        last_sample = samples[-1] if samples else None
        tokens = [] if last_sample is None else last_sample.tokens
        if last_sample is not None and answer.prompt[: len(tokens)] == tokens:
            samples[-1] = replace(answer, earlier=(*last_sample.earlier, (len(last_sample.prompt), len(tokens))))
        else:
            samples.append(answer)
    return samples


def _answer_ends(messages: Sequence[Mapping[str, Any]], *, every: bool, untrained: Sequence[int] = ()) -> list[int]:
    """For each trained answer the number of messages up to it. Raises `ValueError` if there is none."""
    earlier_ends = [
        end
        for end in range(2, len(messages) if every else 0)
        if messages[end - 1]["role"] == "assistant" and messages[end - 2]["role"] in ("user", "tool")
        if not is_empty(messages[end - 1])
    ]
    ends = [end for end in (*earlier_ends, len(messages)) if end - 1 not in untrained]
    if not ends:
        which = "none of its answers" if every else "its last answer"
        raise ValueError(f"{which} is to be trained, as its messages say")
    return ends


def _ids_or_errors(tokenizer: PreTrainedTokenizerBase, texts: Sequence[MaskedText]) -> list[list[int] | str]:
    """The ids of each text, or the reason why there are none."""
    try:
        return list(token_ids(tokenizer, texts))
    except ValueError as error:
        if len(texts) == 1:
            return [str(error)]
        return [ids for text in texts for ids in _ids_or_errors(tokenizer, [text])]


def least_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """A lower bound of a text's tokens: its bytes over the bytes of the longest token.

    It is 0 for vocabularies that are not byte-level, where tokens do not stand for a bounded number of bytes.
    """
    longest = _longest_token(tokenizer, len(tokenizer))
    if not longest:
        return 0
    normalizer = tokenizer.backend_tokenizer.normalizer
    return len((text if normalizer is None else normalizer.normalize_str(text)).encode(errors="replace")) // longest


@lru_cache(maxsize=4)
def _longest_token(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> int:
    """Bytes of the longest token of a byte-level vocabulary of `num_tokens` tokens; 0 for other vocabularies."""
    assert num_tokens == len(tokenizer)
    if not tokenizer.is_fast:
        return 0
    backend = tokenizer.backend_tokenizer
    added_tokens = backend.get_added_tokens_decoder().values()
    if "ByteLevel" not in repr(backend.pre_tokenizer) or any(token.lstrip or token.rstrip for token in added_tokens):
        return 0
    plain = backend.get_vocab(with_added_tokens=False)
    return max(*map(len, plain), *(len(token.content.encode()) for token in added_tokens), 1)


def _texts(tokenizer: PreTrainedTokenizerBase, chat: Chat, end: int) -> tuple[MaskedText, MaskedText]:
    messages, variables = chat.messages[:end], dict(chat.variables or {})
    if is_empty(messages[-1]):
        raise ValueError("its answer is empty")
    masking = masking_of(tokenizer, messages, chat.tools, variables)
    shown: dict[str, Any] = {"tools": chat.tools, "masking": masking, "variables": variables}
    prompt = chat_text(tokenizer, messages[:-1], **shown)
    conversation = chat_text(tokenizer, messages, answered=True, **shown)
    if not conversation.text.startswith(prompt.text):
        raise ValueError(
            "the chat template's prompt is not the beginning of the whole conversation, so where the answer begins is "
            "unknown; change the template, so that it shows earlier turns unchanged"
        )
    reasoning = next((messages[-1][name] for name in REASONING if name in messages[-1]), "")
    if masking.masked(reasoning.strip()) not in conversation.text[len(prompt.text) :]:
        raise ValueError("the chat template does not show its answer's reasoning")
    return prompt, conversation


def _without_end(tokenizer: PreTrainedTokenizerBase, response: list[int], eos_token_id: int) -> list[int]:
    """The response without the EOS of the template and white space after it; the fill adds them again."""
    if eos_token_id not in response:
        return response
    last = len(response) - 1 - response[::-1].index(eos_token_id)
    return response if tokenizer.decode(response[last + 1 :]).strip() else response[:last]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template. Equal digests mean equal encodings of conversations."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    return hashlib.sha256(content.encode()).hexdigest()
