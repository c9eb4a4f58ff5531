"""An answer is a string to everybody, and keeps its counts through copies and caches."""

import copy
import json
import pickle

from mbd_core.decoding.answers.counts import Counts
from mbd_core.harness.scoring import CountedText

COUNTS = Counts(
    num_prompt_tokens=5,
    num_tokens=12,
    num_forwards=4,
    num_store_forwards=1,
    num_prefill_forwards=1,
    decode_seconds=0.5,
)


def test_it_is_a_string_with_the_measures_of_its_decoding() -> None:
    text = CountedText("#### 7", COUNTS, "length")
    assert text == "#### 7" and json.dumps([text]) == '["#### 7"]' and text.upper() == "#### 7"
    assert text.measures() == {"nfe": 4.0, "tokens": 12.0, "tpf": 3.0, "tps": 24.0, "cut": 1.0}
    assert CountedText("").measures() == {}


def test_a_cache_and_a_copy_keep_the_counts() -> None:
    text = CountedText("#### 7", COUNTS, "stop")
    for other in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert other == text and other.measures() == text.measures() and other.finish_reason == "stop"
