"""The settings of a canvas say no, by the field's name, to what cannot be honoured."""

import math
from dataclasses import asdict, is_dataclass
from typing import Any

import pytest

from mbd_core.decoding.blocks.canvas_config import Branches, Leap, MultiBlock, Refresh
from mbd_core.decoding.blocks.config import decoding_config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_length": 0}, "canvas.block_length"),
        ({"accept": "best"}, "canvas.accept"),
        ({"score": "luck"}, "canvas.score"),
        ({"cache": "both"}, "canvas.cache"),
        ({"tau": 1.2}, "canvas.tau"),
        ({"cfg_scale": -1.0}, "canvas.cfg_scale"),
        ({"cfg_scale": math.inf}, "canvas.cfg_scale"),
        ({"accept": "quota", "tau": 0.5}, "canvas.tau"),
        ({"factor": 2.0}, "canvas.factor"),
        ({"eps": 0.1}, "canvas.eps"),
        ({"accept": "factor", "steps": 4}, "canvas.steps"),
        ({"accept": "factor", "score": "margin"}, "canvas.score"),
        ({"accept": "quota", "leap": Leap()}, "canvas.leap"),
        ({"tau": 0.5, "leap": Leap(tau_relaxed=0.6)}, "canvas.leap.tau_relaxed"),
        ({"score_temperature": 0.5}, "canvas.score_temperature"),
        ({"accept": "quota", "score": "random", "score_temperature": 0.5}, "canvas.score_temperature"),
        ({"cache": "dual", "refresh": Refresh()}, "canvas.refresh"),
        ({"block_length": None, "refresh": Refresh()}, "canvas.refresh.response_interval"),
        ({"refresh": 3}, "canvas.refresh=3"),
        ({"branches": Branches(), "cache": "dual"}, "canvas.cache"),
        ({"branches": Branches(), "block_length": 8}, "canvas.block_length"),
        ({"branches": Branches(), "leap": Leap()}, "canvas.leap"),
        ({"branches": Branches(), "cfg_scale": 1.0}, "canvas.cfg_scale"),
        ({"branches": Branches(), "multi_block": MultiBlock()}, "canvas.multi_block"),
        ({"multi_block": MultiBlock(), "tau": 0.5}, "canvas.tau"),
        ({"multi_block": {"refresh": 3}}, "refresh=3"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], named: str) -> None:
    canvas = {name: asdict(value) if is_dataclass(value) else value for name, value in fields.items()}
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        decoding_config({}, {"canvas": canvas}, block_size=4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_lengths": (8, 4)}, "canvas.branches.block_lengths"),
        ({"block_lengths": ()}, "canvas.branches.block_lengths"),
        ({"block_lengths": (4, 4)}, "canvas.branches.block_lengths"),
        ({"tau_merge": 0.0}, "canvas.branches.tau_merge"),
        ({"tau_sync": -1}, "canvas.branches.tau_sync"),
        ({"refresh": 0}, "canvas.branches.refresh"),
        ({"eos_test": "never"}, "canvas.branches.eos_test"),
    ],
)
def test_bad_branch_settings_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        decoding_config({}, {"canvas": {"branches": fields}}, block_size=4)
