"""A stream that was cut is taken up again at another server: its client gets what would have followed."""

from pathlib import Path
from typing import Any

import pytest
from full_attention_folder import make_folder
from local_server import answers

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.serving.api.errors import ApiError

ONE_BLOCK = {"buffer_size": 1, "tau_m2t": 0.95}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("complete", {}),
    "chat": ("chat", {"return_step_map": True}),
    "drawn": ("complete", {"temperature": 1.0, "seed": 7}),
    "drawn without a seed": ("chat", {"temperature": 0.8, "ignore_eos": True}),
    "log-probabilities": ("complete", {"logprobs": 0, "temperature": 1.0, "seed": 3}),
    "echo and usage": ("complete", {"echo": True, "stream_options": {"include_usage": True}}),
    "stop string": ("complete", {"temperature": 1.0, "seed": 5, "stop": ["zzzz", "q#"]}),
    "template": ("complete", {"template": [{"hole": 6}, " and B: ", {"hole": 9}, "."], "max_tokens": None}),
    "regular expression": ("complete", {"guided_regex": "[a-z ]{12,40}"}),
}


def content(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def ids(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]


def joined(chunks: list[dict[str, Any]], *path: str) -> list[Any]:
    """All lists at `path` of the choices, one behind the other."""
    found: list[Any] = []
    for chunk in chunks:
        value: Any = chunk["choices"][0]
        for name in path:
            value = (value or {}).get(name)
        found += value or ()
    return found


def cuts(chunks: list[dict[str, Any]]) -> list[int]:
    """How many chunks a client has that was cut behind a place."""
    return [i + 1 for i, chunk in enumerate(chunks) if chunk["choices"] and "resume" in chunk["choices"][0]]


def numbers(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunks[cut - 1]["choices"][0]["resume"] for cut in cuts(chunks)]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_the_rest_at_another_server_is_what_would_have_followed(tiny_model_dir: Path, case: str, every: int) -> None:
    """Behind the first place that a stream names and every fourth, or every one."""
    route, fields = CASES[case]
    asked = {"stream": True, "resumable": True, "decoding": ONE_BLOCK, **fields}
    asked = {name: value for name, value in asked.items() if value is not None}
    if "template" in asked:
        asked["max_tokens"] = None
    (whole,) = answers(tiny_model_dir, (route, asked))
    assert isinstance(whole, list), whole
    usage = [chunk for chunk in whole if not chunk["choices"]]
    whole = [chunk for chunk in whole if chunk["choices"]]
    assert len(cuts(whole)) > 1, "too short an answer to be cut"
    places = cuts(whole)[::every]
    again = []
    for cut in places:
        place = whole[cut - 1]["choices"][0]["resume"]
        have = ids(whole[:cut])
        assert place["num_tokens"] == len(have)
        assert ("seed" in place) is ("temperature" in fields)
        again.append((route, asked | {"resume": place | {"token_ids": have}}))
    for cut, rest in zip(places, answers(tiny_model_dir, *again), strict=True):
        if isinstance(rest, Exception):
            raise rest
        later_usage = [chunk for chunk in rest if not chunk["choices"]]
        rest = [chunk for chunk in rest if chunk["choices"]]
        assert {chunk["id"] for chunk in rest} == {whole[0]["id"]}
        assert "".join(map(content, whole[:cut] + rest)) == "".join(map(content, whole))
        assert ids(whole[:cut]) + ids(rest) == ids(whole)
        assert rest[-1]["choices"][0]["finish_reason"] == whole[-1]["choices"][0]["finish_reason"]
        for path in (("rollout", "step_map"), ("logprobs", "tokens"), ("logprobs", "text_offset")):
            assert joined(whole[:cut], *path) + joined(rest, *path) == joined(whole, *path), path
        expected = joined(whole, "logprobs", "token_logprobs")
        assert joined(whole[:cut] + rest, "logprobs", "token_logprobs") == pytest.approx(expected, abs=1e-4)
        assert numbers(rest) == numbers(whole[cut:]), "it has the places that were still to come"
        if usage:
            assert later_usage[0]["usage"]["completion_tokens"] == usage[0]["usage"]["completion_tokens"]


def test_each_choice_of_several_is_taken_up_by_itself(tiny_model_dir: Path) -> None:
    asked = {"stream": True, "resumable": True, "decoding": ONE_BLOCK, "temperature": 1.0, "seed": 11, "n": 3}
    (whole,) = answers(tiny_model_dir, ("complete", asked))
    again, expected = [], []
    for index in range(3):
        chunks = [chunk for chunk in whole if chunk["choices"][0]["index"] == index]
        cut = cuts(chunks)[0]
        place = chunks[cut - 1]["choices"][0]["resume"]
        assert place["seed"] == 11 + index
        again.append(("complete", asked | {"n": 1, "resume": place | {"token_ids": ids(chunks[:cut])}}))
        expected.append(ids(chunks[cut:]))
    assert [ids(rest) for rest in answers(tiny_model_dir, *again)] == expected


def test_a_larger_buffer_goes_on_behind_the_place_and_repeats_nothing(tiny_model_dir: Path) -> None:
    asked = {"stream": True, "resumable": True, "decoding": {"buffer_size": 4, "tau_m2t": 0.9}}
    (whole,) = answers(tiny_model_dir, ("complete", asked))
    cut = cuts(whole)[0]
    place = whole[cut - 1]["choices"][0]["resume"]
    resumed = asked | {"resume": place | {"token_ids": ids(whole[:cut])}}
    ((rest), (same)) = answers(tiny_model_dir, ("complete", resumed), ("complete", resumed))
    assert ids(rest) == ids(same)
    assert len(ids(whole[:cut])) + len(ids(rest)) <= 60
    assert rest[-1]["mbd"]["num_tokens"] == place["num_tokens"] + len(ids(rest))


PLACE = {"id": "cmpl-" + "0" * 32, "num_tokens": 2, "forwards": 3, "token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"resumable": True, "stream": False}, "resumable", "only allowed when stream is true"),
        ({"resume": PLACE, "stream": False}, "resume", "only allowed when stream is true"),
        ({"resume": PLACE, "n": 2}, "resume", "takes up one choice"),
        ({"resume": PLACE, "prompt": ["a", "b"]}, "resume", "takes up one choice"),
        ({"resume": PLACE | {"token_ids": [5]}}, "resume", "num_tokens is 2, and token_ids has 1"),
        ({"resume": PLACE | {"token_ids": [5, 10**6]}}, "resume", "outside the vocabulary"),
        ({"resume": PLACE | {"token_ids": [5, -1]}}, "resume.token_ids.1", "greater than or equal to 0"),
        ({"resume": PLACE | {"forwards": 2**31}}, "resume.forwards", "less than 2147483648"),
        ({"resume": PLACE | {"id": "mine"}}, "resume.id", "must match pattern"),
        ({"resume": PLACE | {"more": 1}}, "resume.more", "unknown field"),
        ({"resume": PLACE, "max_tokens": 2}, "resume", "nothing is left"),
        ({"resume": PLACE, "guided_regex": "x"}, "guided_regex", "does not accept the tokens"),
    ],
)
def test_what_cannot_be_taken_up_is_refused_by_name(
    tiny_model_dir: Path, fields: dict[str, Any], param: str, sentence: str
) -> None:
    (error,) = answers(tiny_model_dir, ("complete", {"stream": True} | fields))
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, param)
    assert sentence in error.message


def test_tokens_that_hold_a_stop_string_are_an_answer_that_has_ended(tiny_model_dir: Path) -> None:
    (whole,) = answers(tiny_model_dir, ("complete", {"stream": True, "resumable": True, "decoding": ONE_BLOCK}))
    cut = cuts(whole)[-1]
    place = whole[cut - 1]["choices"][0]["resume"] | {"token_ids": ids(whole[:cut])}
    text = "".join(map(content, whole[:cut]))
    (error,) = answers(tiny_model_dir, ("complete", {"stream": True, "resume": place, "stop": [text[2:6]]}))
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, "resume")
    assert "the answer has ended" in error.message


def test_calls_and_canvases_are_not_taken_up(tiny_model_dir: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked = {"stream": True, "resumable": True}
    (error,) = answers(tiny_model_dir, ("chat", asked | {"tools": [tool], "tool_choice": "required"}))
    assert isinstance(error, ApiError) and error.param == "resumable"
    tokenizer = load_tokenizer(tiny_model_dir, load_config(tiny_model_dir))
    folder = make_folder("llada", tmp_path / "llada", tokenizer)
    (error,) = answers(folder, ("complete", asked | {"max_tokens": 8, "decoding": {"canvas": {}}}))
    assert isinstance(error, ApiError) and (error.param, error.status) == ("resumable", 400)


def test_a_stream_that_did_not_ask_has_no_places(tiny_model_dir: Path) -> None:
    (plain,) = answers(tiny_model_dir, ("complete", {"stream": True}))
    assert not cuts(plain) and not ids(plain)
