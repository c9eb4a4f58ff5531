"""Which of our exceptions becomes which error for the client."""

import json

import pytest

from mbd_core.serving.api.errors import MESSAGE_LENGTH, VALUE_LENGTH, ApiError, api_error, clip
from mbd_core.serving.tokens.stream import EngineFailed, TooManyRequests


@pytest.mark.parametrize(
    ("failure", "code"),
    [(EngineFailed("the engine failed: secret"), "engine_failed"), (KeyError("secret"), "internal_error")],
)
def test_an_internal_failure_is_reported_without_its_details(failure: Exception, code: str) -> None:
    seen = api_error(failure)
    error = seen.body["error"]
    assert (seen.status, error["type"], error["code"]) == (500, "server_error", code)
    assert set(error) == {"message", "type", "param", "code"}
    assert "secret" not in json.dumps(seen.body)


def test_a_full_server_is_429_and_a_refusal_stays_itself() -> None:
    full = api_error(TooManyRequests("4 requests are running or waiting; try again later"))
    assert (full.status, full.headers) == (429, {"Retry-After": "1"})
    refusal = ApiError(400, "no", param="n")
    assert api_error(refusal) is refusal


def test_a_client_s_value_is_repeated_only_in_part() -> None:
    exact = "x" * VALUE_LENGTH
    assert clip(exact) == exact
    assert clip(exact + "y") == exact + "..."


def test_no_error_carries_an_endless_message_or_param() -> None:
    error = ApiError(400, "decoding: " + "x" * 1_000_000, param="y" * 1_000_000).body["error"]
    assert error["message"].startswith("decoding: xxx")
    assert (len(error["message"]), len(error["param"])) == (MESSAGE_LENGTH + 3, VALUE_LENGTH + 3)
