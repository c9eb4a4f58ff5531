"""What the host decides within a step (grammars, templates, scores) is the same over two ranks as over one."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from small_groups import gist

from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.causal.verified import DraftRound
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule.draft_lengths import ConfirmedRates, DraftLengths
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.tokens.load import LoadedModel, load_engine

pytestmark = pytest.mark.usefixtures("warm_followers")

SIZES = EngineConfig(max_rows=4, num_pages=90)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "of": {"enum": ["pens", "apples"]}},
    "required": ["name", "of"],
    "additionalProperties": False,
}
CALLS = r"start: TEXT (CALL)?" + "\nTEXT: /[a-z 0-9]*/\n" + r'CALL: "<tool_call>" /[a-z]{1,4}/ "</tool_call>"'
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True, "max_tokens": 20},
    "schema": {"grammar": Grammar(syntax="json_schema", text=json.dumps(SCHEMA))},
    "drawn schema": {
        "grammar": Grammar(syntax="json_schema", text=json.dumps(SCHEMA)),
        "sampling": Sampling(temperature=1.0, seed=3),
    },
    "regex": {"grammar": Grammar(syntax="regex", text="([a-z]+;)+end"), "rollout": True},
    "calls": {"grammar": Grammar(syntax="lark", text=CALLS, may_be_cut=True), "max_tokens": 30},
    "template": {"template": (*[None] * 5, 20, 21, 22, *[None] * 4), "max_tokens": 12, "ignore_eos": True},
    "scores": {"template": (30, 31, 32, 33, None), "max_tokens": 5, "ignore_eos": True, "scored": True},
    "adjusted": {
        "sampling": Sampling(logit_bias=((30, 2.0),), repetition_penalty=1.3, presence_penalty=0.5),
        "min_tokens": 20,
        "max_tokens": 24,
        "top_logprobs": 3,
    },
    "adjusted and drawn": {
        "sampling": Sampling(temperature=0.9, min_p=0.02, frequency_penalty=0.5, seed=4),
        "ignore_eos": True,
        "stop_token_ids": (60, 61),
        "max_tokens": 24,
    },
}


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir: Path) -> Iterator[LoadedModel]:
    with load_engine(tiny_model_dir, SIZES, tensor_parallel=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def one_rank(tiny_model_dir: Path) -> Iterator[LoadedModel]:
    with load_engine(tiny_model_dir, SIZES) as loaded:
        yield loaded


def asked(loaded: LoadedModel, name: str, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "prompt": tuple(range(20, 27 + len(name))),
        "max_tokens": 48,
        "decoding": loaded.decoding({"buffer_size": 3, "tau_m2t": 0.2, "tau_add": 0.1, "t2t": None, "soft": None}),
        "logprobs": True,
    }
    return Request(**{"request_id": name} | fields | KINDS[name] | changes)


def serve(engine: Engine, requests: list[Request]) -> dict[str, Output]:
    """More requests than rows; two are preempted, in the middle of what was decided, and one is aborted."""
    outputs: dict[str, Output] = {}
    for request in requests:
        engine.add(request)
    engine.add(replace(requests[1], request_id="aborted"))
    for number in range(300):
        if number in (2, 5):
            engine.preempt()
        if number == 7 and (aborted := engine.abort("aborted")) is not None:
            outputs["aborted"] = aborted
        for step in engine.step():
            if step.output is not None:
                outputs[step.request_id] = step.output
        if not engine.has_work:
            engine.check_integrity()
            return outputs
    raise AssertionError("the requests did not end")


def test_all_kinds_in_one_batch_are_as_over_one_rank(one_rank: LoadedModel, two_ranks: LoadedModel) -> None:
    requests = [asked(one_rank, name) for name in KINDS]
    wanted, found = serve(one_rank.engine, requests), serve(two_ranks.engine, requests)
    assert {name: gist(o) for name, o in found.items()} == {name: gist(o) for name, o in wanted.items()}
    assert sum(o.counts.num_preemptions for o in found.values()) == 2
    for name, output in found.items():
        assert output.piece.logprobs == pytest.approx(wanted[name].piece.logprobs, abs=1e-3)
    assert [s.logprob for s in found["scores"].scores] == pytest.approx(
        [s.logprob for s in wanted["scores"].scores], abs=1e-3
    )
    assert found["regex"].piece.steps is not None and wanted["regex"].piece.steps is not None
    assert found["regex"].piece.steps == wanted["regex"].piece.steps
    for name in ("schema", "drawn schema"):
        jsonschema.validate(json.loads(two_ranks.tokenizer.decode(found[name].tokens)), SCHEMA)


def test_an_answer_goes_on_over_two_ranks(one_rank: LoadedModel, two_ranks: LoadedModel) -> None:
    """After the loss of a replica: inside its grammar, with the closing that it carries."""
    request = asked(one_rank, "schema")
    one_rank.engine.add(request)
    steps = []
    while one_rank.engine.has_work:
        steps += one_rank.engine.step()
    done = steps[len(steps) // 2 - 1]
    committed = tuple(token for step in steps[: len(steps) // 2] for token in step.piece.tokens)
    rest = replace(
        request, committed=committed, first_forward=done.counts.num_forwards, closing=done.closing, logprobs=False
    )
    assert committed and done.closing
    assert list(map(gist, two_ranks.engine.generate([rest]))) == list(map(gist, one_rank.engine.generate([rest])))


def test_a_grammar_that_is_refused_reaches_no_follower(one_rank: LoadedModel, two_ranks: LoadedModel) -> None:
    with pytest.raises(RequestRefused, match="accepts no text"):
        two_ranks.engine.add(asked(one_rank, "schema", grammar=Grammar(syntax="json_schema", text='{"$ref": "#"}')))
    request = asked(one_rank, "regex")
    assert gist(two_ranks.engine.generate([request])[0]) == gist(one_rank.engine.generate([request])[0])


def test_ranks_draft_as_many_blocks_as_rank_0_chooses(
    one_rank: LoadedModel, two_ranks: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0's choice is patched; another rank's own measures would give it rows of another length."""
    rng, chosen = random.Random(1), set[int]()

    def choose(self: DraftLengths, rounds: list[DraftRound], rates: ConfirmedRates, *, num_running: int) -> int:
        number = rng.randint(1, len(rounds))
        chosen.add(number)
        return number

    monkeypatch.setattr(DraftLengths, "choose", choose)
    exact = {"exact": True, "store": "causal"}
    of_one, measured = (
        one_rank.decoding({"buffer_size": slots, "verify": verify})
        for slots, verify in ((1, exact), (3, exact | {"slots": "measured"}))
    )
    requests = [asked(one_rank, "plain", request_id=f"r{n}", prompt=tuple(range(20, 29 + n))) for n in range(6)]
    wanted = serve(one_rank.engine, [replace(r, decoding=of_one) for r in requests])
    found = serve(two_ranks.engine, [replace(r, decoding=measured) for r in requests])
    assert {name: o.tokens for name, o in found.items() if name != "aborted"} == {
        name: o.tokens for name, o in wanted.items() if name != "aborted"
    }
    assert chosen == {1, 2, 3}
