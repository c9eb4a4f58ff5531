"""What a client has under way is counted in choices, however they come."""

import asyncio
from typing import Any

import pytest

from mbd_core.serving.api.errors import ApiError, api_error
from mbd_core.serving.server.open_requests import OpenRequest, OpenRequests
from mbd_core.serving.server.text_stream import OpenChoices
from mbd_core.serving.tokens.stream import TooManyRequests


def begun(requests: OpenRequests, client: str, num_prompts: int = 1, num_each: int = 1) -> OpenRequest:
    request = requests.begin(client)
    try:
        request.take_choices(num_prompts, num_each, prompt_field="prompt")
    except Exception:
        request.end()
        raise
    return request


def test_each_choice_of_each_prompt_counts() -> None:
    requests = OpenRequests(most_each=8)
    six = begun(requests, "ann", 3, 2)
    two = begun(requests, "ann", 1, 2)
    for shape in ((1, 1), (2, 1), (1, 2), (2, 4)):
        with pytest.raises(TooManyRequests, match="8 choices") as refused:
            begun(requests, "ann", *shape)
        error = api_error(refused.value)
        assert (error.status, error.code, error.headers) == (429, "too_many_requests", {"Retry-After": "1"})
    two.end()
    for shape in ((3, 1), (1, 3)):
        with pytest.raises(TooManyRequests, match="3 more"):
            begun(requests, "ann", *shape)
    begun(requests, "ann", 2, 1)
    six.end()
    six.end()  # counts once
    begun(requests, "ann", 2, 3)
    with pytest.raises(TooManyRequests):
        begun(requests, "ann")


def test_a_body_that_could_never_be_taken_is_refused_for_good() -> None:
    requests = OpenRequests(most_each=8)
    for shape, field in (((9, 1), "prompt"), ((1, 9), "n"), ((3, 3), "n"), ((9, 9), "prompt")):
        with pytest.raises(ApiError, match="8") as refused:
            begun(requests, "ann", *shape)
        assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, "invalid_value")
    begun(requests, "ann", 2, 4)


def test_clients_do_not_count_for_each_other_and_one_without_a_name_has_no_limit() -> None:
    requests = OpenRequests(most_each=4)
    for client in ("ann", "ben"):
        begun(requests, client, 2, 2)
    for _ in range(3):
        begun(requests, "", 100, 100)
    for _ in range(3):
        begun(OpenRequests(), "ann", 100, 100)


def test_a_drain_waits_for_every_request_and_takes_no_more() -> None:
    async def scenario() -> None:
        requests = OpenRequests(most_each=4)
        first, second = begun(requests, "ann", 1, 3), begun(requests, "ben")
        assert requests.begin_drain() == 2
        with pytest.raises(ApiError) as refused:
            requests.begin("cat")
        assert (refused.value.status, refused.value.code) == (503, "shutting_down")
        first.end()
        assert await requests.wait_until_drained(0.0) == 1
        second.end()
        assert await requests.wait_until_drained(60.0) == 0

    asyncio.run(scenario())


def test_choices_that_the_engines_would_refuse_are_refused_before() -> None:
    class Stream:
        def __init__(self, number: int) -> None:
            self.unfinished = set(range(number))

    choices = OpenChoices(8)
    six: Any = Stream(6)
    with choices.opening("ann", 6):
        with pytest.raises(TooManyRequests, match="6 choices"):
            choices.check("ann", 3)
        choices.add("ann", six)
    choices.check("ann", 2)
    choices.check("ben", 4)  # ben's share, though two places are left
    with pytest.raises(TooManyRequests):
        choices.check("ben", 5)
    six.unfinished.pop()
    choices.check("ann", 3)
    six.unfinished.clear()
    choices.check("ann", 8)
    with pytest.raises(ValueError), choices.opening("ann", 8):
        raise ValueError("opening failed")
    choices.check("ann", 8)
