"""A request in the form of another API than OpenAI's chats: it stands for a chat, which the engines answer."""

from functools import cached_property
from typing import Self

from pydantic import model_validator

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.parsing import Strict
from mbd_core.serving.api.requests import ChatRequest


class ChatDialect(Strict):
    """A request that stands for a chat."""

    @cached_property
    def chat(self) -> ChatRequest:
        """The chat. Raises its `ApiError`, with this request's field."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _stands_for_a_chat(self) -> Self:
        """Make the chat in the turn of its body's parsing: for a large body, both take as long."""
        _ = self.chat
        return self

    def own_error(self, error: ApiError) -> ApiError:
        """The chat's refusal, with the chat's field replaced by the field of this request."""
        raise NotImplementedError


def renamed(error: ApiError, field: str | None) -> ApiError:
    """The error with another field in `param` and in its message."""
    if field == error.param or field is None or error.param is None:
        return error
    message = error.message.replace(error.param, field, 1)
    return ApiError(error.status, message, param=field, code=error.code, headers=error.headers)
