"""A resumed answer is read on as if it had never been cut: nothing comes twice, and thoughts stay thoughts."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from call_templates import TEMPLATES
from chat_templates import tool_folder
from local_server import server_of

from mbd_core.calls.reader import TextPiece
from mbd_core.calls.thoughts import THOUGHT_FORMS, Thoughts
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.api.requests import ChatRequest
from mbd_core.serving.server.model_route import ModelRoute, TokenizedBody

THINK = THOUGHT_FORMS[0]
MAY_THINK = TEMPLATES["hermes"].replace("{{ m['content'] if", "{{ m['content'].split('</think>')[-1] if")


@pytest.fixture(scope="module")
def route(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRoute]:
    folder = tool_folder(tiny_model_dir, tmp_path_factory.mktemp("thinks") / "model", template=MAY_THINK)
    route = ModelRoute(server_of(folder).served, logging.getLogger(__name__))
    yield route
    route.stop()


def read(route: ModelRoute, tokens: list[int], cut: int, stop: list[str]) -> list[TextPiece]:
    """What each token, and the end, gives of an answer that is resumed after its first `cut` tokens."""
    asked = ChatRequest(model="tiny", messages=[{"role": "user", "content": "?"}], stop=stop)
    decoding, begun = DecodingConfig(block_size=4), tuple(tokens[:cut])
    request = Request(request_id="0", prompt=(1,), max_tokens=100, decoding=decoding, committed=begun)
    body = TokenizedBody(api_request=asked, seed=0, requests=[request], thoughts=Thoughts(THINK, is_open=False))
    [text], reader_of = route.texts(body), route._reader_of(body)
    assert reader_of is not None
    reader = reader_of(request)
    pieces = [reader.push(text.push(token), ends=False) for token in tokens[cut:]]
    return [*pieces, reader.push(text.finish(), ends=True)]


def joined(pieces: list[TextPiece]) -> tuple[str, str]:
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


@pytest.mark.parametrize("stop", [[], ["s!"]], ids=["free", "stop string"])
@pytest.mark.parametrize("said", ["<think>a b</think>\n\nyes", "\nHello", "<the s"])
def test_a_resumed_answer_repeats_nothing(route: ModelRoute, said: str, stop: list[str]) -> None:
    tokens = route.model.tokenizer.encode(said, add_special_tokens=False)
    whole = read(route, tokens, 0, stop)
    assert joined(whole) == (("a b", "yes") if "</think>" in said else ("", said))
    for cut in range(1, len(tokens)):
        assert joined(whole[:cut] + read(route, tokens, cut, stop)) == joined(whole), cut
