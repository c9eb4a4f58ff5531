"""A folder whose model drafts for another's: what fits is loaded and decodes, what does not is one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_server import MODEL, LocalServer, ask, run

from mbd_core import LLM
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import load_engine
from mbd_core.tasks.tiny_tokenizer import train_tokenizer

SMALL = EngineConfig(max_rows=2, num_pages=40)


def test_two_folders_decode_as_the_large_one(large_model_dir: Path, tiny_model_dir: Path) -> None:
    """Without decoding fields, in the draft model's slots; slots alone change their number."""
    sizes = replace(SMALL, draft_model=str(tiny_model_dir))
    with load_engine(large_model_dir, sizes) as loaded:
        default, one = loaded.decoding({}), loaded.decoding({"buffer_size": 1})
        assert default.verify is not None and default.verify.draft_model and default.buffer_size == 4
        assert one == replace(default, buffer_size=1)
        decodings = [default, one, loaded.decoding({"causal": {"method": "ar"}})]
        outputs = [
            loaded.engine.generate([Request(request_id="r", prompt=(9, 9), max_tokens=30, decoding=decoding)])[0]
            for decoding in decodings
        ]
    assert len({output.tokens for output in outputs}) == 1
    assert outputs[0].counts.num_drafted_tokens > 0 and not outputs[2].counts.num_drafted_tokens


def test_a_replica_names_the_folder_of_its_draft_model(
    large_model_dir: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model_dir.parent)
    args = EndpointArgs(
        model=str(large_model_dir), engine=replace(SMALL, draft_model=f"./{tiny_model_dir.name}")
    ).checked()
    assert args.engine.draft_model == str(tiny_model_dir.resolve()) and args.engine.buffer_size == 4


def test_what_does_not_fit_is_one_sentence(large_model_dir: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    model = Decoder(load_config(tiny_model_dir))
    init_weights(model, seed=0, std=0.2)
    save_model(other, model, tokenizer=train_tokenizer(["ten other words"] * 9, vocab_size=300))
    for draft, ranks, message in (
        (other, 1, "give two models of one tokenizer"),
        (large_model_dir, 1, "give a model that fills masks in blocks"),
        (tiny_model_dir, 2, "tensor_parallel=2"),
        (tmp_path / "nothing", 1, "unknown model"),
    ):
        engine = replace(SMALL, draft_model=str(draft))
        with pytest.raises(ValueError, match=message) as refused:
            load_engine(large_model_dir, engine, tensor_parallel=ranks)
        with pytest.raises(ValueError, match=message):
            EndpointArgs(model=str(large_model_dir), engine=engine, tensor_parallel=ranks).checked()
        assert "\n" not in str(refused.value)


def test_replies_and_frames_name_the_draft_model(large_model_dir: Path, tiny_model_dir: Path) -> None:
    """Where it drafts, and only there; the notebook's page of an answer names it too."""
    engine = replace(SMALL, draft_model=str(tiny_model_dir), buffer_size=4)
    server = LocalServer(EngineService(EndpointArgs(model=str(large_model_dir), name=MODEL, engine=engine)))
    alone = {"decoding": {"causal": {"method": "ar"}}}

    async def scenario() -> list[list[dict[str, Any]]]:
        return [await ask(server, "complete", **fields) for fields in ({}, alone, {"stream": True, "frames": True})]

    (drafted,), (single,), events = run(server, scenario)
    assert drafted["mbd"]["draft_model"] == tiny_model_dir.name and "draft_model" not in single["mbd"]
    assert drafted["choices"] == single["choices"]
    frames = [event["frame"] for event in events if "frame" in event]
    assert frames and all(frame["draft_model"] == tiny_model_dir.name for frame in frames)
    with LLM(str(large_model_dir), draft_model=str(tiny_model_dir), max_rows=2, num_pages=40) as llm:
        answer = llm.generate("Tom has 3 apples.", max_tokens=30, trace=True)
    assert answer.trace is not None
    assert f"{large_model_dir.name} (drafts of {tiny_model_dir.name})" in answer.trace.page
    data = answer.trace.page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    (side,) = json.loads(data)["sides"]
    size = load_config(tiny_model_dir).block_size
    assert side["block_size"] == size and len(side["frames"][0]["slots"][0]["tokens"]) == size
