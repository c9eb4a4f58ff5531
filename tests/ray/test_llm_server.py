"""Our engine as a server class of Ray Serve LLM: Ray's protocol, its config, rows, and requests of its ingress."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.protocol import LLMServerProtocol

from actors.serving.llm_server import DiffusionServer, fields_given, model_args

MODEL = "tiny"


def config(folder: Path | str = "tiny-bd", **fields: Any) -> LLMConfig:
    given = {
        "model_loading_config": {"model_id": MODEL, "model_source": str(folder)},
        "server_cls": "actors.serving.llm_server:DiffusionServer",
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {"engine": {"max_rows": 4, "num_pages": 100}, "max_waiting": 2},
    }
    return LLMConfig(**(given | fields))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    own = asyncio.new_event_loop()
    yield own
    own.close()


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, loop: asyncio.AbstractEventLoop) -> Iterator[DiffusionServer]:
    made = config(tiny_model_dir).server_cls(config(tiny_model_dir))
    yield made
    loop.run_until_complete(made.__del__())


def answers(loop: asyncio.AbstractEventLoop, stream: AsyncIterator[Any]) -> list[Any]:
    async def collect() -> list[Any]:
        return [answer async for answer in stream]

    return loop.run_until_complete(collect())


def test_it_has_every_method_of_the_protocol() -> None:
    theirs = {name: method for name, method in vars(LLMServerProtocol).items() if inspect.isfunction(method)}
    assert {"chat", "completions", "check_health", "start", "llm_config", "sleep"} <= theirs.keys()
    for name, method in theirs.items():
        if name.startswith("_"):  # what a `Protocol` adds itself
            continue
        ours = inspect.signature(getattr(DiffusionServer, name)).parameters
        for parameter in inspect.signature(method).parameters.values():
            taken = parameter.name in ours or any(p.kind is p.VAR_KEYWORD for p in ours.values())
            assert taken, f"{name} does not take {parameter.name}"


def test_the_config_describes_the_model() -> None:
    model = model_args(config())
    assert (model.model, model.name, model.engine.max_rows, model.max_waiting) == ("tiny-bd", MODEL, 4, 2)
    alone = LLMConfig(model_loading_config={"model_id": "tiny-bd"})
    assert (model_args(alone).model, model_args(alone).name) == ("tiny-bd", "tiny-bd")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_kwargs": {"max_model_len": 100}}, "max_model_len"),
        ({"engine_kwargs": {"replicas": 2}}, "replicas has no effect here"),
        (
            {"engine_kwargs": {"adapters": {"poet": "x"}}},
            "adapters and weights are served by actors.serving.app:build",
        ),
        ({"lora_config": {}}, "lora_config: .* actors.serving.app:build serves them"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionServer.get_deployment_options(config(**fields))


def test_replicas_ask_for_what_their_ranks_need() -> None:
    options = DiffusionServer.get_deployment_options(config(deployment_config={"num_replicas": 2}))
    assert options["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}
    assert (options["num_replicas"], options["max_ongoing_requests"]) == (2, 6)
    gpus = {"accelerator_config": {"kind": "gpu"}, "accelerator_type": "H100", "engine_kwargs": {"tensor_parallel": 2}}
    actor = DiffusionServer.get_deployment_options(config(**gpus))["ray_actor_options"]
    assert actor == {"num_cpus": 2, "num_gpus": 2, "accelerator_type": "H100"}
    with pytest.raises(ValueError, match="kind=tpu is not supported"):
        DiffusionServer.get_deployment_options(config(accelerator_config={"kind": "tpu"}))


def test_rows_are_answered_and_bad_ones_can_be_left_out(
    server: DiffusionServer, loop: asyncio.AbstractEventLoop
) -> None:
    row = {"request_id": "0", "idx_in_batch": 3, "model": MODEL, "max_tokens": 6}
    (chat,) = answers(loop, server.chat(row | {"messages": [{"role": "user", "content": "Tom has 12 pens."}]}))
    assert chat["object"] == "chat.completion" and chat["mbd"]["num_tokens"] <= 6
    (one,) = answers(loop, server.completions(row | {"prompt": "Tom", "decoding": {"buffer_size": 1}}))
    assert one["object"] == "text_completion"
    for bad in ({"prompt": "Tom", "best_of": 3}, {"prompt": "Tom", "stream": True}, {}):
        with pytest.raises(ValueError, match=r"best_of|stream|prompt"):
            answers(loop, server.completions(row | bad))
    with pytest.raises(ValueError, match="embeddings: not supported"):
        answers(loop, server.embeddings({"input": "Tom"}))


def test_rows_that_are_too_many_wait(server: DiffusionServer, loop: asyncio.AbstractEventLoop) -> None:
    """Six are taken at once."""
    row = {"model": MODEL, "prompt": "Tom", "max_tokens": 20, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}

    async def crowd() -> list[Any]:
        async def ask() -> Any:
            return [answer async for answer in server.completions(row)]

        return await asyncio.gather(*(ask() for _ in range(14)))

    replies = loop.run_until_complete(crowd())
    assert len({reply["choices"][0]["text"] for (reply,) in replies}) == 1


def test_it_says_what_it_is_and_what_it_cannot_do(server: DiffusionServer, loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(server.start())
    loop.run_until_complete(server.check_health())
    assert loop.run_until_complete(server.llm_config()).model_id == MODEL
    assert not loop.run_until_complete(server.is_sleeping())
    with pytest.raises(NotImplementedError, match="pause: not supported"):
        loop.run_until_complete(server.pause())


def test_it_sleeps_and_wakes_up(server: DiffusionServer, loop: asyncio.AbstractEventLoop) -> None:
    row = {"model": MODEL, "prompt": "Tom", "max_tokens": 6}
    (before,) = answers(loop, server.completions(row))
    for options in ({"level": 2}, {"tags": ["weights"]}, {"seconds": -1.0}):
        with pytest.raises(ValueError, match=r"level=2|tags|seconds"):
            loop.run_until_complete(server.sleep(**options))
    for options in ({"level": 1}, {"requests": "abort", "seconds": 60.0}):
        loop.run_until_complete(server.sleep(**options))
        assert loop.run_until_complete(server.is_sleeping())
        loop.run_until_complete(server.check_health())
        with pytest.raises(RuntimeError, match="the server sleeps"):
            answers(loop, server.completions(row))
        with pytest.raises(ValueError, match="takes no options"):
            loop.run_until_complete(server.wakeup(tags=["weights"]))
        loop.run_until_complete(server.wakeup())
        assert not loop.run_until_complete(server.is_sleeping())
        (again,) = answers(loop, server.completions(row))
        assert again["choices"] == before["choices"]


class Turn(BaseModel):
    role: str
    content: str
    tool_calls: list[Any] | None = None


class KeepsExtras(BaseModel, extra="allow"):
    """As vLLM's types are."""

    model: str
    messages: list[Turn]
    tool_choice: str | None = None
    temperature: float | None = 0.7


class DropsExtras(BaseModel):
    """As SGLang's types are."""

    model: str
    messages: list[Turn]
    temperature: float | None = 0.7
    custom_params: dict[str, Any] | None = None


def test_only_what_the_client_gave_counts_and_decoding_arrives_with_both_kinds_of_types() -> None:
    given = {"model": MODEL, "messages": [{"role": "user", "content": "Tom", "tool_calls": None}]}
    plain = {"model": MODEL, "messages": [{"role": "user", "content": "Tom"}]}
    decoding = {"decoding": {"buffer_size": 2}}
    assert fields_given(KeepsExtras(**given, **decoding, tool_choice="none")) == plain | decoding
    assert fields_given(DropsExtras(**given, **decoding)) == plain, "this is lost before it comes to us"
    assert fields_given(DropsExtras(**given, custom_params=decoding)) == plain | decoding
    other = {"custom_params": {"decoding": {}, "top_a": 1}}
    assert fields_given(DropsExtras(**given, **other)) == plain | other, "refused later, by name"
    assert json.dumps(fields_given(KeepsExtras(**given)))
