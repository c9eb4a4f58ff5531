"""What real clients sent is taken: the bodies that tests/clients recorded, their texts cut short."""

import json
from pathlib import Path

import pytest
from client_bodies import FILE, Body, read_bodies
from client_installs import CLIENTS
from client_table import PAGE, with_table

from mbd_core.calls.forms import HERMES
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.tokenizer import grammars_of, load_tokenizer
from mbd_core.decoding.grammar.guide import Grammars
from mbd_core.serving.api.messages import MessagesRequest
from mbd_core.serving.api.parsing import parse
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest
from mbd_core.serving.api.responses import ResponsesRequest

BUDGET = 256  # tokens of an answer
BODIES = read_bodies(FILE)


@pytest.fixture(scope="module")
def grammars(tiny_model_dir: Path) -> Grammars:
    config = load_config(tiny_model_dir)
    return grammars_of(load_tokenizer(tiny_model_dir, config), config)


def chat_of(body: Body) -> ChatRequest | CompletionRequest:
    content = json.dumps(body.body).encode()
    if body.route == "/v1/responses":
        return parse(ResponsesRequest, content).chat
    if body.route == "/v1/messages":
        return parse(MessagesRequest, content).chat
    return parse(CompletionRequest if body.route == "/v1/completions" else ChatRequest, content)


@pytest.mark.parametrize("client", sorted({body.client for body in BODIES}))
def test_what_a_client_sent_is_taken(client: str, grammars: Grammars) -> None:
    for body in (body for body in BODIES if body.client == client):
        request = chat_of(body)
        rule = request.call_rule if isinstance(request, ChatRequest) else None
        grammar = request.grammar if rule is None else rule.grammar(HERMES, {})
        if grammar is not None:
            grammars.guide(grammar, max_tokens=BUDGET)


def test_every_kind_of_every_client_was_recorded() -> None:
    assert {(body.client, body.kind) for body in BODIES} == {
        (client.name, kind) for client in CLIENTS for kind in client.kinds
    }


def test_the_page_of_clients_has_their_table() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "write it anew: python -m pytest -m slow tests/clients --write-clients"
