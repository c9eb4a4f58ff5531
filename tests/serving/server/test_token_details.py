"""Token ids and step maps in replies, whole and streamed, for completions and chat; they replay through the model."""

from pathlib import Path
from typing import Any

import pytest
from local_server import ROUTES, LocalServer, ask, run, server_of
from step_replay import check_replay

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.serving.api.errors import ApiError

ASKED = {
    "max_tokens": 30,
    "return_token_ids": True,
    "return_step_map": True,
    "decoding": {"buffer_size": 2, "tau_m2t": 0.02},
}

NO_COUNTS = Counts(
    num_prompt_tokens=0,
    num_tokens=0,
    num_forwards=0,
    num_store_forwards=0,
    num_prefill_forwards=0,
    decode_seconds=0.0,
)


def answered(folder: Path, *asked: tuple[str, dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], LocalServer]:
    server = server_of(folder)

    async def scenario() -> list[list[dict[str, Any]]]:
        return [await ask(server, route, **fields) for route, fields in asked]

    return run(server, scenario), server


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stop", [None, " "])
def test_streamed_details_join_to_the_whole_answer_s_and_replay(
    tiny_model_dir: Path, route: str, stop: str | None
) -> None:
    fields = ASKED | {"stop": stop, "temperature": 1.0, "seed": 5}
    (whole, events), server = answered(tiny_model_dir, (route, fields), (route, fields | {"stream": True}))
    choice = whole[0]["choices"][0]
    assert len(choice["token_ids"]) == whole[0]["usage"]["completion_tokens"] == len(choice["rollout"]["step_map"])
    assert len(choice["prompt_token_ids"]) == whole[0]["usage"]["prompt_tokens"]

    chunks = [event["choices"][0] for event in events]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [choice["prompt_token_ids"]]
    assert [t for c in chunks for t in c.get("token_ids", [])] == choice["token_ids"]
    parts = [c["rollout"] for c in chunks if "rollout" in c]
    assert len(parts) > 1
    for name in ("step_map", "logprobs"):
        assert [value for part in parts for value in part[name]] == choice["rollout"][name]
    assert [p["terminal"] for p in parts if "terminal" in p] == [choice["rollout"]["terminal"]]

    terminal = choice["rollout"]["terminal"]
    request = Request(
        request_id="a",
        prompt=tuple(choice["prompt_token_ids"]),
        max_tokens=30,
        decoding=DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.02),
        sampling=Sampling(temperature=1.0, seed=5),
    )
    output = Output(
        request_id="a",
        finish_reason="stop",
        counts=NO_COUNTS,
        piece=Piece(
            tokens=tuple(choice["token_ids"]),
            steps=tuple(choice["rollout"]["step_map"]),
            logprobs=tuple(choice["rollout"]["logprobs"]),
        ),
        tail=Piece(
            tokens=tuple(terminal["token_ids"]),
            steps=tuple(terminal["step_map"]),
            logprobs=tuple(terminal["logprobs"]),
        ),
    )
    assert check_replay(load_model(tiny_model_dir), request, output, vocab_size=len(server.served.tokenizer)) > 1


def test_nothing_of_it_is_there_where_it_was_not_asked_for(tiny_model_dir: Path) -> None:
    (whole, events), _ = answered(tiny_model_dir, ("chat", {}), ("chat", {"stream": True}))
    for choice in (whole[0]["choices"][0], *(event["choices"][0] for event in events)):
        assert not {"token_ids", "prompt_token_ids", "rollout"} & choice.keys()


def test_a_step_map_of_tokens_that_change_is_a_400(tiny_model_dir: Path) -> None:
    with pytest.raises(ApiError, match="return_step_map") as caught:
        answered(tiny_model_dir, ("complete", {"return_step_map": True, "decoding": {"t2t": {}}}))
    assert (caught.value.status, caught.value.param) == (400, "return_step_map")
