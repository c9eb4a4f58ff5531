"""actors/serving/proxy: what a client's X-Request-ID becomes before Serve logs and returns it."""

import asyncio
from typing import Any

import pytest

from actors.serving.proxy import CALLBACK, MAX_LENGTH, ShortRequestId, middlewares


def received(headers: list[tuple[bytes, bytes]], kind: str = "http") -> list[tuple[bytes, bytes]]:
    """The headers that the application behind the middleware gets."""
    scopes: list[dict[str, Any]] = []

    async def app(scope: Any, *_: Any) -> None:
        scopes.append(dict(scope))

    asyncio.run(ShortRequestId(app)({"type": kind, "headers": headers}, None, None))  # type: ignore[arg-type]
    (scope,) = scopes
    return list(scope["headers"])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"0f1e-22.a_b:c", b"0f1e-22.a_b:c"),
        (b"x" * 1_000_000, b"x" * MAX_LENGTH),
        ("a b\x1b[31m\u00e9,{".encode("latin-1"), b"a_b__31m___"),
        (b"", b""),
    ],
)
def test_a_request_id_is_short_and_plain(given: bytes, kept: bytes) -> None:
    other = (b"accept", b"*/*")
    assert received([other, (b"x-request-id", given)]) == [other, (b"x-request-id", kept)]


def test_a_request_without_an_id_gets_serve_s_own() -> None:
    assert received([(b"accept", b"*/*")]) == [(b"accept", b"*/*")]


def test_serve_finds_the_callback() -> None:
    from ray._common.utils import import_attr

    assert import_attr(CALLBACK) is middlewares
    assert ShortRequestId in [middleware.cls for middleware in middlewares()]
