"""The tokenizer over HTTP: texts and chats to ids, ids to text, and the parts of which a client builds prompts."""

from transformers import PreTrainedTokenizerBase

from mbd_core.serving.api.chat_fields import turns
from mbd_core.serving.api.chat_ids import chat_ids
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.requests import DetokenizeRequest, TokenizeRequest
from mbd_core.serving.api.shapes import TokenIds, TokenizerInfo, TokenText
from mbd_core.serving.api.tokenizing import text_ids
from mbd_core.serving.tokens.served_model import ServedModel


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
