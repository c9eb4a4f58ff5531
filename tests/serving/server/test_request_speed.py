"""`speed` in a request is the decoding that was measured there."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from local_server import ROUTES, answers, server_of

from mbd_core.decoding.blocks.methods import KEY
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.openapi import openapi_document

SLOW = {"buffer_size": 1, "tau_m2t": 1.0, "tokens_per_step": 1}
MIDDLE = {"buffer_size": 1, "tokens_per_step": 2}
FAST = {"buffer_size": 4, "tokens_per_step": 4, "tau_m2t": 0.0}
POINTS = [
    {"decoding": decoding, "accuracy": accuracy, "tpf": tpf}
    for decoding, accuracy, tpf in ((SLOW, 90, 1), (MIDDLE, 80, 2), (FAST, 10, 5))
]
COUNTS = ("num_tokens", "num_forwards")


def with_front(folder: Path, target: Path, points: list[dict[str, Any]]) -> Path:
    shutil.copytree(folder, target)
    path = target / "generation_config.json"
    front = {"tasks": ["gsm-mini"], "num_samples": 5, "points": points}
    path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: front}))
    return target


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return with_front(tiny_model_dir, tmp_path / "model", POINTS)


@pytest.mark.parametrize("route", ROUTES)
def test_a_speed_decodes_as_its_point_does(folder: Path, route: str) -> None:
    asked = [{"speed": 0.0}, {"speed": 0.3}, {"speed": 1}, *({"decoding": d} for d in (SLOW, MIDDLE, FAST))]
    objects = answers(folder, *((route, fields) for fields in asked), (route, {"speed": 1, "stream": True}))
    whole = [o[0] for o in objects[:6]]
    assert [o["mbd"].get("speed") for o in whole] == [0, 0.25, 1, None, None, None]
    for by_speed, by_decoding in zip(whole[:3], whole[3:], strict=True):
        assert by_speed["choices"] == by_decoding["choices"]
        assert [by_speed["mbd"][name] for name in COUNTS] == [by_decoding["mbd"][name] for name in COUNTS]
    forwards = [o["mbd"]["num_forwards"] for o in whole[:3]]
    assert forwards[0] > forwards[1] > forwards[2]
    assert objects[6][-1]["mbd"]["speed"] == 1


def test_what_cannot_be_honoured_is_refused_by_name(folder: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    both, much, text = answers(
        folder,
        ("chat", {"speed": 0.5, "decoding": {}}),
        ("chat", {"speed": 1.01}),
        ("chat", {"speed": "fast"}),
    )
    [none] = answers(tiny_model_dir, ("chat", {"speed": 0.5}))
    wide = with_front(tiny_model_dir, tmp_path / "wide", [{"decoding": {"buffer_size": 99}, "accuracy": 9, "tpf": 9}])
    [unfit] = answers(wide, ("chat", {"speed": 0.5}))
    for error in (both, much, text, none, unfit):
        assert isinstance(error, ApiError) and (error.status, error.param) == (400, "speed"), error
    assert "give one of them" in both.message
    assert "no measured front" in none.message and "jobs/report_sweep.py front" in none.message
    assert "exceeds this engine's" in unfit.message


def test_health_names_the_points(folder: Path, tiny_model_dir: Path) -> None:
    front = server_of(folder).service.state()["speed_front"]
    assert [(p["speed"], p["accuracy"], p["tpf"], p["decoding"]) for p in front["points"]] == [
        (0, 90, 1, SLOW),
        (0.25, 80, 2, MIDDLE),
        (1, 10, 5, FAST),
    ]
    assert front["tasks"] == ["gsm-mini"]
    shape = {**openapi_document(), "$ref": "#/components/schemas/Front"}
    jsonschema.Draft202012Validator(shape).validate(front)
    assert server_of(tiny_model_dir).service.state()["speed_front"] is None


def test_a_folder_with_a_wrong_front_is_not_served(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = with_front(tiny_model_dir, tmp_path / "model", [{"decoding": {"tau": 1}, "accuracy": 9, "tpf": 9}])
    with pytest.raises(ValueError, match=r"speed_front\.points\.0"):
        server_of(folder)
