"""What the harness asks of a generation: its limit, stop strings and sampling, and decoding fields beside them."""

from typing import Any

import pytest

from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.evaluation.tasks.generation_fields import read_generation


def test_a_task_s_fields_become_a_generation() -> None:
    found = read_generation({"until": ["Q:", ""], "max_gen_toks": 64, "do_sample": False, "temperature": 0.7})
    assert (found.stop, found.max_tokens, found.sampling, found.decoding) == (("Q:",), 64, Sampling(), {})
    drawn = read_generation({"until": "\n", "do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 3})
    assert (drawn.stop, drawn.sampling) == (("\n",), Sampling(temperature=0.7, top_p=0.9, seed=3))


def test_without_a_limit_it_is_the_papers_and_other_names_are_decoding_fields() -> None:
    found = read_generation({"until": None, "tau_m2t": 0.8, "max_new_tokens": 10, "max_tokens": 10})
    assert (found.max_tokens, found.decoding, found.stop) == (10, {"tau_m2t": 0.8}, ())
    assert read_generation({}).max_tokens == 4096


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be a whole number of at least 1"),
        ({"max_gen_toks": 2.5}, "max_gen_toks=2.5 must be"),
        ({"max_gen_toks": 5, "max_tokens": 6}, "are two limits of one answer"),
        ({"until": [3]}, "must be a text or a list of texts"),
        ({"do_sample": True}, "do_sample=True needs a temperature above 0"),
        ({"temperature": -1}, "temperature=-1 must be a number from 0 to 10"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_generation(given)
