"""Rows of Ray Data as requests: `ServeDeploymentProcessorConfig` calls the gateway for each row."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from mbd_core.serving.api.errors import api_error
from mbd_core.serving.api.shapes import Completion
from mbd_core.serving.server.answer import ServedAnswer
from mbd_core.serving.tokens.stream import TooManyRequests

log = logging.getLogger("ray.serve")

ROWS_KEY = "ray data"  # in the queue, all rows together count as one client
ADDED_FIELDS = ("request_id", "idx_in_batch")  # by Ray Data, to each row
WAIT_SECONDS = 0.2  # before a row that was refused for lack of room is sent again


async def answer_row(
    ask: Callable[[bytes], Awaitable[ServedAnswer]], row: Mapping[str, Any]
) -> AsyncIterator[Completion]:
    """A stream of one item, the whole answer to a row. A row that is refused for lack of room waits and is sent again.

    Raises `ValueError` for a bad row, which Ray Data can leave out, and `RuntimeError` for other failures.
    """
    if row.get("stream"):
        raise ValueError("stream: a row gets its answer whole; leave it out")
    body = json.dumps({name: value for name, value in row.items() if name not in ADDED_FIELDS}).encode()
    while True:
        try:
            answer = await ask(body)
            try:
                whole = await answer.whole()
            finally:
                answer.close()
        except TooManyRequests:
            await asyncio.sleep(WAIT_SECONDS)
        except Exception as error:  # our exceptions have several arguments and cannot be pickled
            api_failure = api_error(error)
            if api_failure.status < 500:
                raise ValueError(api_failure.message) from None
            log.error("a row failed", exc_info=error)
            raise RuntimeError(api_failure.message) from None
        else:
            yield whole
            return
