"""A model that verifies by default goes on to verify where a request or an option changes its slots alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from local_server import ROUTES, answers

from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.tokens.load import load_engine

EXACT = {"exact": True, "store": "causal"}
HYSTERESIS = {"route": "hysteresis"}


def folder_with(tiny_model_dir: Path, target: Path, **defaults: Any) -> Path:
    shutil.copytree(tiny_model_dir, target)
    path = target / "generation_config.json"
    own = {"eos_token_id": json.loads(path.read_text())["eos_token_id"], "trained_with": "teacher_forcing"}
    path.write_text(json.dumps(own | defaults))
    return target


def test_slots_alone_change_how_many_blocks_are_verified() -> None:
    defaults = {"buffer_size": 1, "verify": EXACT}
    for fields in ({"buffer_size": 3}, {"buffer_size": 3, "tau_add": 0.5}):
        decoding = decoding_config(defaults, fields, block_size=4)
        assert decoding.verify is not None and decoding.verify.exact and decoding.buffer_size == 3
    for fields in ({"buffer_size": 3, "verify": None}, {"buffer_size": 3, "soft": {}}):
        assert decoding_config(defaults, fields, block_size=4).verify is None
    assert decoding_config({"verify": HYSTERESIS}, {"buffer_size": 1}, block_size=4).verify is not None
    for more, remedy in (({"verify": HYSTERESIS}, "route be span"), ({"verify": {}, "t2t": {}}, "verify be null")):
        with pytest.raises(ValueError, match=rf"cannot be had with (verify and )?buffer_size=2; .*{remedy}"):
            decoding_config(more, {"buffer_size": 2}, block_size=4)


def test_an_engine_s_answer_of_other_slots_is_still_that_of_block_size_1(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = folder_with(tiny_model_dir, tmp_path / "model", verify=EXACT)
    with load_engine(folder, EngineConfig(max_rows=4, num_pages=200, buffer_size=4, dtype="float32")) as loaded:
        requests = [
            Request(
                request_id=f"r{slots}",
                prompt=(30, 41, 52, 63, 74),
                max_tokens=40,
                decoding=loaded.decoding({} if slots == 1 else {"buffer_size": slots}),
                ignore_eos=True,
            )
            for slots in (1, 2, 4)
        ]
        outputs = loaded.engine.generate(requests)
    assert len({output.tokens for output in outputs}) == 1
    assert all(output.counts.num_drafted_tokens for output in outputs)


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_over_http_keeps_verifying_or_is_refused(tiny_model_dir: Path, tmp_path: Path, route: str) -> None:
    exact = folder_with(tiny_model_dir, tmp_path / "exact", verify=EXACT)
    asked = [{"temperature": 0, "decoding": d} for d in ({}, {"buffer_size": 2}, {"buffer_size": 2, "verify": None})]
    one, two, off = (objects[0] for objects in answers(exact, *((route, fields) for fields in asked)))
    assert one["choices"] == two["choices"]
    assert one["mbd"]["num_drafted_tokens"] and two["mbd"]["num_drafted_tokens"]
    assert not off["mbd"].get("num_drafted_tokens")
    state = folder_with(tiny_model_dir, tmp_path / "state", verify=HYSTERESIS)
    kept, refused = answers(state, *((route, {"decoding": {"buffer_size": slots}}) for slots in (1, 2)))
    assert kept[0]["choices"]
    assert isinstance(refused, ApiError) and (refused.status, refused.param) == (400, "decoding")
    assert "cannot be had with buffer_size=2; let route be span or score, or buffer_size be 1" in refused.message


def test_a_grid_of_slots_keeps_verifying(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = folder_with(tiny_model_dir, tmp_path / "exact", verify=EXACT)
    options = SweepOptions(models=[str(folder)], tasks=["gsm-mini"], limit=1, grid="buffer_size=2,4")
    configs = [json.loads(row["config"]) for row in plan_sweep(load_inputs(options)).rows()]
    assert [(config["buffer_size"], config["verify"]["exact"]) for config in configs] == [
        (1, True),
        (2, True),
        (4, True),
    ]
    state = folder_with(tiny_model_dir, tmp_path / "state", verify=HYSTERESIS)
    with pytest.raises(ValueError, match="let route be span or score, or buffer_size be 1"):
        plan_sweep(load_inputs(SweepOptions(models=[str(state)], tasks=["gsm-mini"], grid="buffer_size=2")))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["first", "second"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def test_a_schema_is_kept_over_http_and_what_cannot_keep_it_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = folder_with(tiny_model_dir, tmp_path / "exact", verify=EXACT)
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    greedy = {"temperature": 0, **form}
    one, two, streamed, drawn, loose = answers(
        folder,
        ("chat", greedy),
        ("chat", greedy | {"decoding": {"buffer_size": 2}}),
        ("chat", greedy | {"stream": True}),
        ("chat", form | {"temperature": 0.5}),
        ("chat", greedy | {"decoding": {"verify": {}}}),
    )
    text = one[0]["choices"][0]["message"]["content"]
    assert json.loads(text)["kind"] in ("first", "second")
    assert two[0]["choices"][0]["message"]["content"] == text
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in streamed if e["choices"]) == text
    assert one[0]["mbd"]["num_drafted_tokens"]
    assert json.loads(drawn[0]["choices"][0]["message"]["content"])["kind"] in ("first", "second")
    assert isinstance(loose, ApiError) and loose.status == 400 and "let verify.exact be true" in loose.message
