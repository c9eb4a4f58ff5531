"""A decoding configuration says no, by the field's name, to what it cannot honour."""

import re
from typing import Any

import pytest

from mbd_core.decoding.blocks.config import Soft, decoding_config

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tau_m2t": 1.5}, "tau_m2t=1.5"),
    ({"tau_add": "0.1"}, 'tau_add="0.1"'),
    ({"buffer_size": 0}, "buffer_size=0"),
    ({"buffer_size": True}, "buffer_size=true"),
    ({"tokens_per_step": 9}, "tokens_per_step=9 exceeds block_size=4"),
    ({"fallback": "best"}, 'fallback="best" must be one of "confidence", "leftmost", "margin", "neg_entropy"'),
    ({"prefix_cache": 1}, "prefix_cache=1 must be one of null, true, false"),
    ({"tau_stable": 0.5}, "tau_stable=0.5 needs t2t or soft"),
    ({"t2t": {}, "soft": {}}, "t2t and soft"),
    ({"soft": {}, "tokens_per_step": 2}, "tokens_per_step"),
    ({"soft": {}, "fallback": "leftmost"}, "fallback"),
    ({"t2t": {"tau": 2}}, "t2t.tau=2"),
    ({"t2t": {"tau": "x"}}, 't2t.tau="x"'),
    ({"t2t": {"max_edits": 0}}, "t2t.max_edits=0"),
    ({"t2t": {"tua": 1}}, "t2t.tua"),
    ({"t2t": 0.5}, "t2t=0.5"),
    ({"t2t": []}, "t2t=[]"),
    ({"soft": {"stop_confidence": None}}, "soft.stop_confidence=null"),
    ({"prompt_attention": "full", "prefix_cache": True}, "prefix_cache=True"),
    ({"canvas": {}, "prefix_cache": True}, "prefix_cache=True"),
    ({"canvas": {}, "buffer_size": 2}, "buffer_size=2"),
    ({"canvas": {}, "t2t": {}}, "t2t"),
    ({"canvas": {"cache": "some"}}, 'canvas.cache="some" must be one of "none", "prefix", "dual"'),
    ({"canvas": {"branches": {"block_lengths": [8, 4]}}}, "branches.block_lengths"),
    ({"canvas": {"forbid_eos": None}}, "canvas.forbid_eos=null must be one of true, false"),
    ({"canvas": {"branches": {"block_lengths": 8}}}, "branches.block_lengths"),
    ({"canvas": {"leap": {"radius": 0}}}, "leap.radius=0"),
    ({"sub_block": 3}, "sub_block=3 does not divide block_size=4"),
    ({"sub_block": 2, "canvas": {}}, "sub_block=2"),
    ({"carry": True, "t2t": {}}, "leave out t2t"),
    ({"carry": True, "prompt_attention": "full"}, "prompt_attention='full'"),
    ({"use_block_cache": True}, "'use_block_cache'"),
    ({"remasking": True}, "'remasking'"),
    ({"block_size": 8}, "block_size=8"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[n for _, n in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        decoding_config({}, fields, block_size=4)


def test_a_request_that_names_a_method_is_not_held_to_the_defaults_of_another() -> None:
    blockwise = {"buffer_size": 4, "tau_m2t": 0.9, "temperature": 1.0}
    assert decoding_config(blockwise, {"canvas": {"cache": "dual"}}, block_size=4).buffer_size == 1
    assert decoding_config({"canvas": {}}, {"buffer_size": 2}, block_size=4).canvas is None
    assert decoding_config({"canvas": {"tau": 0.5}}, {}, block_size=4).canvas is not None
    assert decoding_config(blockwise, {"soft": {}}, block_size=4).soft == Soft()


def test_two_ways_to_revise_or_accept_replace_each_other() -> None:
    """A request names one of them, and the model's own goes; `null` names none."""
    of_models: list[dict[str, Any]] = [{"t2t": {}, "tau_m2t": 0.9}, {"entropy": {"gamma": 2.0}}]
    for of_model in of_models:
        assert decoding_config(of_model, {"soft": {}}, block_size=4).soft == Soft()
    for fields in ({"t2t": {}}, {"entropy": {"gamma": 2.0}}):
        assert decoding_config({"soft": {}}, fields, block_size=4).soft is None
    assert decoding_config({"soft": {}}, {"t2t": None, "entropy": None}, block_size=4).soft == Soft()
    with pytest.raises(ValueError, match="t2t and soft are two ways"):
        decoding_config({}, {"soft": {}, "t2t": {}}, block_size=4)
