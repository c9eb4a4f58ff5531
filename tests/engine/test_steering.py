"""Answers under a grammar parse and validate, whatever the weights say; templates keep their text; all others in the
batch decode as ever."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from random_schemas import schema_requests
from step_replay import check_replay

from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, Soft
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.grammar.closings import Closings, Search
from mbd_core.decoding.grammar.grammar import MAX_CHARACTERS, Grammar
from mbd_core.decoding.grammar.guide import AllowedToken, Guide
from mbd_core.decoding.grammar.schemas import GrammarRefused, check_bounds
from mbd_core.engine import engine as engine_module
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.tokens.load import LoadedModel, load_engine
from mbd_core.tasks import gsm_mini

B = 4
WIDE = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(600)}})
METHODS: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.5},
    "multi": {"buffer_size": 3, "tau_m2t": 0.2, "tau_add": 0.1},
    "quota": {"buffer_size": 2, "tokens_per_step": 2},
}


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> Iterator[LoadedModel]:
    with load_engine(tiny_model_dir, EngineConfig(max_rows=8, num_pages=300)) as loaded:
        yield loaded


def other_engine(loaded: LoadedModel, **changes: Any) -> Engine:
    """An engine over the same model and grammars."""
    config = replace(loaded.engine.config, **changes)
    vocab_limit = len(loaded.tokenizer)
    return Engine(loaded.engine.model, config, vocab_limit=vocab_limit, grammars=loaded.engine._grammars)


def asked(seed: int, grammar: Grammar | None, method: str = "multi", **changes: Any) -> Request:
    rng = random.Random(seed)
    fields: dict[str, Any] = {
        "prompt": tuple(rng.choices(range(20, 300), k=rng.randint(1, 19))),
        "max_tokens": 120,
        "decoding": DecodingConfig(block_size=B, **METHODS[method]),
        "sampling": Sampling(temperature=(0.0, 1.0)[seed % 2], top_p=(1.0, 0.9)[seed % 3 == 0], seed=seed),
        "logprobs": True,
        "grammar": grammar,
    }
    return Request(request_id=f"r{seed}", **fields | changes)


def asked_schemas(
    loaded: LoadedModel, number: int, seed: int = 0, budgets: tuple[int, int] = (100, 160)
) -> list[tuple[Request, dict[str, Any]]]:
    def ask(place: int, grammar: Grammar, rng: random.Random) -> Request:
        return asked(place, grammar, rng.choice(list(METHODS)), max_tokens=rng.choice(budgets))

    return schema_requests(loaded, number, ask, seed=seed)


def text_of(loaded: LoadedModel, output: Output) -> str:
    text = loaded.tokenizer.decode(list(output.tokens), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def check_answers(loaded: LoadedModel, asked_for: list[tuple[Request, dict[str, Any]]], outputs: list[Output]) -> None:
    for (request, schema), output in zip(asked_for, outputs, strict=True):
        assert output.finish_reason == "stop" and len(output.tokens) < request.max_tokens
        jsonschema.validate(json.loads(text_of(loaded, output)), schema)


def gist(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.piece.logprobs, output.finish_reason, output.counts.num_forwards


def run(engine: Engine, requests: list[Request], rng: random.Random | None = None) -> list[Output]:
    for request in requests:
        engine.add(request)
    outputs: dict[str, Output] = {}
    while engine.has_work:
        if rng is not None and rng.random() < 0.2:
            engine.preempt()
        outputs |= {s.request_id: s.output for s in engine.step() if s.output is not None}
    return [outputs[r.request_id] for r in requests]


@pytest.mark.parametrize("number", [12, pytest.param(30, marks=pytest.mark.slow)])
def test_every_answer_of_a_random_model_validates(loaded: LoadedModel, number: int) -> None:
    requests = asked_schemas(loaded, number)
    check_answers(loaded, requests, loaded.engine.generate([r for r, _ in requests]))


def test_alone_is_in_a_mixed_batch_is_static_is_preempted(loaded: LoadedModel) -> None:
    guided = [r for r, _ in asked_schemas(loaded, 2, seed=3, budgets=(50, 60))]
    plain = [asked(100 + i, None, max_tokens=20, ignore_eos=True) for i in range(2)]
    requests = [guided[0], plain[0], template_request(50, (5, 3, 4)), guided[1], plain[1]]
    exact = {"batch_invariant": True, "max_rows": 4}
    alone = [gist(other_engine(loaded, **exact).generate([r])[0]) for r in requests]
    static = other_engine(loaded, **exact, static_shapes=True, overlap=True)
    assert [gist(o) for o in static.generate(requests)] == alone
    for static_shapes in (False, True):
        engine = other_engine(loaded, **exact, static_shapes=static_shapes)
        preempted = run(engine, requests, random.Random(7))
        assert sum(o.counts.num_preemptions for o in preempted) > 3
        assert [gist(o) for o in preempted] == alone
        engine.check_integrity()


@pytest.mark.parametrize(
    ("syntax", "text", "pattern"),
    [
        ("regex", "[a-c]{3,9}", "[a-c]{3,9}"),
        ("regex", "a+b", "a+b"),
        ("regex", "x{25,}", "x{25,}"),
        ("regex", "<b>.*</b>", "<b>.*</b>"),
        ("regex", r"([^\n#]+\n)+#### -?[0-9]+", r"([^\n#]+\n)+#### -?[0-9]+"),
        ("regex", "([a-z]+;)+end", "([a-z]+;)+end"),
        ("json_schema", '{"type": "string", "format": "email"}', '"[^@]+@[^@]+"'),
        ("lark", 'start: "(" start ")" | /[0-9]/', r"\(*[0-9]\)*"),
    ],
)
def test_regular_expressions_and_grammars_hold(loaded: LoadedModel, syntax: Any, text: str, pattern: str) -> None:
    requests = [asked(i, Grammar(syntax=syntax, text=text), max_tokens=40) for i in range(4)]
    for output in loaded.engine.generate(requests):
        assert re.fullmatch(pattern, text_of(loaded, output))
        assert output.finish_reason == "stop" and len(output.tokens) < 40


def test_a_closing_that_is_not_found_is_looked_for_once_a_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, found = "(([a-w]{1,40};){300}xy|zend)", list[bool]()
    engine = loaded.engine
    engine.add(asked(0, Grammar(syntax="regex", text=text), "quota", max_tokens=300))
    find = Closings.find

    def counted(*args: Any, **options: Any) -> list[int] | None:
        closing = find(*args, **options)
        found.append(closing is not None)
        return closing

    monkeypatch.setattr(Closings, "find", counted)
    outputs, most = list[Output](), 0
    while engine.has_work:
        found.clear()
        outputs += [s.output for s in engine.step() if s.output is not None]
        most = max(most, len(found))
    assert most == 1
    assert re.fullmatch(text, text_of(loaded, outputs[0]))


HARD = "(([a-w]{1,40};){300}xy|zend)"  # behind its beginning no closing is found, and each step looks for one


def hard_requests(number: int) -> list[Request]:
    return [asked(2 * i, Grammar(syntax="regex", text=HARD), "quota", max_tokens=40) for i in range(number)]


class SeenSearches:
    """Of each step: the tries of all its searches together, and in how many rows one began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries, self.begun, self.most_each = [0], [0], 0
        count, find = Search.count, Closings.find

        def counted(search: Search, tries: int) -> None:
            self.tries[-1] += tries
            count(search, tries)

        def begun(*arguments: Any, **options: Any) -> list[int] | None:
            self.begun[-1] += 1
            before = self.tries[-1]
            closing = find(*arguments, **options)
            self.most_each = max(self.most_each, self.tries[-1] - before)
            return closing

        monkeypatch.setattr(Search, "count", counted)
        monkeypatch.setattr(Closings, "find", begun)

    def run(self, engine: Engine, requests: list[Request]) -> list[Output]:
        for request in requests:
            engine.add(request)
        outputs: dict[str, Output] = {}
        self.tries, self.begun, self.most_each = [0], [0], 0
        while engine.has_work:
            outputs |= {s.request_id: s.output for s in engine.step() if s.output is not None}
            self.tries.append(0)
            self.begun.append(0)
        return [outputs[r.request_id] for r in requests]


def test_the_rows_of_a_step_share_one_bound_on_their_searches(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, requests = SeenSearches(monkeypatch), hard_requests(8)
    (alone,) = seen.run(loaded.engine, requests[:1])
    each = max(seen.tries)
    assert each > 1000, "such a search is work"
    monkeypatch.setattr(engine_module, "STEP_TRIES", 2 * each)
    together = seen.run(loaded.engine, requests)
    assert max(seen.tries) <= 2 * each + seen.most_each + 8 * B * 64 * 40
    assert max(seen.begun) < 8
    assert all(re.fullmatch(HARD, text_of(loaded, output)) for output in (alone, *together))
    assert [gist(o) for o in seen.run(loaded.engine, requests)] == [gist(o) for o in together], "nothing is timed"


def test_rows_take_turns_where_one_search_is_too_much(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row goes on, whatever its place in the batch; a row that waits keeps its state."""
    monkeypatch.setattr(engine_module, "STEP_TRIES", 1)
    seen, requests = SeenSearches(monkeypatch), hard_requests(6)
    waits, extend = list[int](), Guide.extend

    def watched(guide: Guide, *arguments: Any, **options: Any) -> Any:
        before = guide.rest(0)
        decided = extend(guide, *arguments, **options)
        waits.append(guide.waited)
        assert decided or guide.rest(0) == before
        return decided

    monkeypatch.setattr(Guide, "extend", watched)
    outputs = seen.run(loaded.engine, requests)
    assert max(seen.begun) == 1
    assert 0 < max(waits) < len(requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output.finish_reason == "stop" and re.fullmatch(HARD, text_of(loaded, output))
        assert len(output.tokens) < request.max_tokens


def test_every_answer_validates_where_rows_wait(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STEP_TRIES", 1)
    requests = [(replace(r, rollout=True), schema) for r, schema in asked_schemas(loaded, 8, seed=21)]
    outputs = loaded.engine.generate([r for r, _ in requests])
    check_answers(loaded, requests, outputs)
    for output in outputs:
        assert output.piece.steps is not None and max(output.piece.steps) <= output.counts.num_forwards


@pytest.mark.parametrize("number", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_wait_get_the_tokens_they_have_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, temperature: float, number: int
) -> None:
    monkeypatch.setattr(engine_module, "STEP_TRIES", 1)
    methods, sampling = itertools.cycle(METHODS), Sampling(temperature=temperature, seed=5)
    requests = [
        replace(r, sampling=sampling, decoding=DecodingConfig(block_size=B, **METHODS[next(methods)]))
        for r, _ in asked_schemas(loaded, number, seed=21)
    ]
    alone = [loaded.engine.generate([r])[0] for r in requests]
    together = loaded.engine.generate(requests)
    assert [o.tokens for o in together] == [o.tokens for o in alone]
    forwards = [[o.counts.num_forwards for o in outputs] for outputs in (together, alone)]
    assert forwards[0] != forwards[1], "else no row has waited"


def test_under_batch_invariance_no_row_waits_for_others(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STEP_TRIES", 1)
    requests = hard_requests(4)
    alone = [gist(other_engine(loaded, batch_invariant=True).generate([r])[0]) for r in requests]
    engine = other_engine(loaded, batch_invariant=True)
    assert [gist(o) for o in engine.generate(requests)] == alone
    waiting = [gist(o) for o in other_engine(loaded).generate(requests)]
    assert [g[3] for g in waiting] != [g[3] for g in alone], "else it shows nothing"


def test_what_is_forced_costs_no_forward_but_its_store(loaded: LoadedModel) -> None:
    text = "Tom has 12 apples and buys 5 pens."
    for method in ("single", "multi"):
        request = asked(0, Grammar(syntax="lark", text=f'start: "{text}"'), method, prompt=tuple(range(20, 28)))
        output = loaded.engine.generate([request])[0]
        assert text_of(loaded, output) == text
        blocks = -(-(len(output.tokens) + 1) // B)
        assert blocks <= output.counts.num_forwards <= blocks + 1
        assert output.piece.logprobs == (0.0,) * len(output.tokens)


def test_what_the_grammar_or_the_budget_leaves_alone_is_no_choice(loaded: LoadedModel) -> None:
    """The one allowed token, an EOS among them, comes with the choice before it, and is none of its quota."""

    (eos,) = loaded.engine.model.config.eos_token_ids

    def last_allowed(_: int, allowed_V: np.ndarray) -> AllowedToken:
        return AllowedToken(max(t for t in np.flatnonzero(allowed_V).tolist() if t != eos), 0.5, False)

    def decided(text: str, max_tokens: int) -> tuple[list[int], list[list[int]]]:
        guide, steps = loaded.engine.compile(asked(0, Grammar(syntax="regex", text=text), max_tokens=max_tokens)), []
        assert isinstance(guide, Guide)
        forced = guide.pending
        guide.pending = []
        while not guide.ended:
            trail = guide.extend(9, 9, last_allowed, tau=1.0, quota=1, search=Search())
            steps.append([token for token, _ in trail])
        return forced, steps

    forced, steps = decided("x", 9)
    assert forced[-1] == eos and not steps
    forced, steps = decided("[ab]z", 9)
    assert not forced and len(steps) == 1 and steps[0][-1] == eos
    forced, steps = decided("[a-c]+", 4)
    assert not forced and len(steps) == 3 and len(steps[-1]) == 2 and steps[-1][-1] == eos


def test_the_budget_is_kept_by_closing_in_time(loaded: LoadedModel) -> None:
    """Drawn from a random model, strings and lists would never end by themselves."""
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    grammar = Grammar(syntax="json_schema", text=json.dumps(schema))
    hot = Sampling(temperature=2.0, seed=5)
    for budget in (4, 12, 13, 14, 15, 16, 40):
        request = asked(3, grammar, max_tokens=budget, sampling=hot)
        check_answers(loaded, [(request, schema)], loaded.engine.generate([request]))
    with pytest.raises(RequestRefused, match="at most 2 tokens") as caught:
        loaded.engine.add(asked(3, grammar, max_tokens=2))
    assert caught.value.field == "grammar"


def test_a_resumed_answer_goes_on_inside_its_grammar(loaded: LoadedModel) -> None:
    for request, schema in asked_schemas(loaded, 3, seed=9):
        loaded.engine.add(request)
        steps = []
        while loaded.engine.has_work:
            steps += loaded.engine.step()
        for cut in range(1, len(steps), 3):
            committed = tuple(t for s in steps[:cut] for t in s.piece.tokens)
            forwards, closing = steps[cut - 1].counts.num_forwards, steps[cut - 1].closing
            rest = replace(request, committed=committed, first_forward=forwards, closing=closing)
            output = loaded.engine.generate([rest])[0]
            assert output.tokens[: len(committed)] == committed
            check_answers(loaded, [(request, schema)], [output])
    grammar = Grammar(syntax="regex", text="[0-9]+")
    with pytest.raises(RequestRefused, match="tokens that were committed"):
        loaded.engine.add(asked(1, grammar, committed=(300, 301)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decoding": DecodingConfig(block_size=B, t2t=T2T())}, "t2t changes tokens"),
        ({"decoding": DecodingConfig(block_size=B, soft=Soft())}, "soft changes tokens"),
        ({"ignore_eos": True}, "leave out ignore_eos"),
        ({"template": (None,) * 120, "ignore_eos": True}, "give one of them"),
        ({"grammar": Grammar(syntax="regex", text="(")}, "the regular expression cannot be honoured"),
        ({"grammar": Grammar(syntax="json_schema", text='{"$ref": "#"}')}, "accepts no text"),
        ({"grammar": Grammar(syntax="json_schema", text='{"not": {}}')}, "cannot be honoured: Unimplemented keys"),
        *(
            ({"grammar": Grammar(syntax="json_schema", text=json.dumps(schema))}, reason)
            for schema, reason in (
                ({"type": "array", "uniqueItems": True}, "uniqueItems"),
                ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf needs alternatives"),
                ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]}, "give anyOf"),
                ({"type": "object", "minProperties": 2}, "minProperties 2 with 0 required names"),
                ({"properties": {"a": {"required": ["b"], "minProperties": 3}}}, "minProperties 3 with 1 required"),
                ({"properties": {"a": {}, "b": {}}, "maxProperties": 1, "minProperties": 0}, "maxProperties"),
            )
        ),
        ({"grammar": Grammar(syntax="json_schema", text=WIDE)}, "simplify it: Parser Error: Current row has"),
        ({"grammar": Grammar(syntax="json_schema", text='{"const": "<|mask|>"}')}, "'<|mask|>' is a special token"),
        ({"grammar": Grammar(syntax="regex", text=r"<\|mask\|>")}, "accepts no text: '<|mask|>' is a special token"),
        *(
            (
                {"grammar": Grammar(syntax="json_schema", text=json.dumps({"items": bounds}))},
                "another bound less than 1 away",
            )
            for bounds in (
                {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
                {"exclusiveMinimum": 9.0, "exclusiveMaximum": 9.5, "minimum": 3},
                {"type": ["number", "null"], "minimum": -0.1, "exclusiveMaximum": 0},
                {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
                {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 8}]},
            )
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(loaded: LoadedModel, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason.replace("|", r"\|")) as caught:
        loaded.engine.add(replace(asked(1, Grammar(syntax="regex", text="a")), **changes))
    assert caught.value.field == "grammar"
    assert not loaded.engine.has_work


ONE_OF = {"oneOf": [{"const": 1}, {"const": True, "title": "on"}, {"enum": ["a", None]}]}
BY_KIND = {"oneOf": [{"properties": {"k": {"const": c}}, "required": ["k"]} for c in "ab"]}
NAMED = {"type": "object", "properties": {"oneOf": {"type": "boolean"}, "uniqueItems": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (ONE_OF, ["1", "true", '"a"', "null"], ["2", "false", '"b"']),
        ({"properties": {"x": ONE_OF}, "required": ["x"]}, ['{"x":1}'], ['{"x":2}']),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["1", '"x"'], ["1.5", "null"]),
        (BY_KIND | {"type": "object"}, ['{"k":"a"}', '{"k":"b"}'], ['{"k":"c"}', "{}"]),
        ({"type": "array", "uniqueItems": False, "items": ONE_OF}, ["[1,1]"], ["[2]"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]", "[]"], ["[1,1]"]),
        (NAMED, ['{"oneOf":true,"uniqueItems":false}'], ['{"oneOf":1}']),
        ({"const": {"uniqueItems": False}}, ['{"uniqueItems":false}'], ["{}"]),
        ({"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a":1}', '{"a":1,"b":2}'], ["{}"]),
        ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
    ],
)
def test_keywords_mean_what_the_schema_says(
    loaded: LoadedModel, schema: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    matcher, _ = loaded.engine._grammars._matcher(Grammar(syntax="json_schema", text=json.dumps(schema)))
    checker = jsonschema.Draft202012Validator(schema)
    for text in (*valid, *invalid):
        tokens = loaded.tokenizer.encode(json.dumps(json.loads(text)), add_special_tokens=False)
        after = matcher.deep_copy()
        taken = after.try_consume_tokens(tokens) == len(tokens) and after.is_accepting()
        assert taken == checker.is_valid(json.loads(text)) == (text in valid), text


def test_json_has_the_white_space_of_json_dumps(loaded: LoadedModel) -> None:
    """Models have learnt it from chat templates and data; other white space costs right answers."""
    schema = {"properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object"}}}
    matcher, _ = loaded.engine._grammars._matcher(Grammar(syntax="json_schema", text=json.dumps(schema)))
    value = {"a": [1, 2], "b": {"c": "d"}}
    for separators, indent in (((", ", ": "), None), ((",", ":"), None), ((",", ": "), 2)):
        text = json.dumps(value, separators=separators, indent=indent)
        tokens, after = loaded.tokenizer.encode(text, add_special_tokens=False), matcher.deep_copy()
        taken = after.try_consume_tokens(tokens) == len(tokens) and after.is_accepting()
        assert taken == (text == json.dumps(value)), text


@pytest.mark.parametrize("exclusive", itertools.product([False, True], repeat=2))
def test_no_bound_of_a_number_is_missed(loaded: LoadedModel, exclusive: tuple[bool, bool]) -> None:
    """Each bound that llguidance takes although it is exclusive is refused, and little else."""
    names = ["exclusive" + n.capitalize() if e else n for e, n in zip(exclusive, ("minimum", "maximum"), strict=True)]
    values, taken = [-2, -1.5, -1, -0.5, -0.001, 0, 0.1, 0.5, 1, 1.25, 9, 9.99, 10], 0
    for pair in itertools.combinations(values, 2):
        schema = {"type": "number", **dict(zip(names, pair, strict=True))}
        try:
            matcher, _ = loaded.engine._grammars._matcher(Grammar(syntax="json_schema", text=json.dumps(schema)))
        except GrammarRefused:
            continue
        taken += 1
        for text in {form for bound in pair for form in (str(bound), f"{bound}.0", "-0", "0", "-0.0")}:
            tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
            after = matcher.deep_copy()
            if after.try_consume_tokens(tokens) == len(tokens) and after.is_accepting():
                jsonschema.validate(json.loads(text), schema)
    assert taken >= 62


def test_bounds_are_compared_where_they_hold_for_one_value() -> None:
    apart = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}]}
    whole = {"type": "integer", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"items": {"$ref": "#/$defs/a"}}]}}, "$ref": "#/$defs/a"}
    for schema in (apart, whole, loop, {"properties": {"allOf": {"type": "number"}}, "$ref": "#/none"}):
        check_bounds(json.dumps(schema))
    referred = {"$defs": {"a/b": {"exclusiveMinimum": 0}}, "$ref": "#/$defs/a~1b", "oneOf": [{"maximum": 0.5}]}
    with pytest.raises(GrammarRefused, match="give minimum"):
        check_bounds(json.dumps(referred))
    chain = {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1800)}}
    with pytest.raises(GrammarRefused, match="too many others"):
        check_bounds(json.dumps(chain))


def test_a_text_that_is_too_long_and_an_engine_without_a_tokenizer_refuse(loaded: LoadedModel) -> None:
    with pytest.raises(GrammarRefused, match=f"at most {MAX_CHARACTERS} are taken"):
        Grammar(syntax="regex", text="a" * (MAX_CHARACTERS + 1))
    engine = Engine(loaded.engine.model, loaded.engine.config)
    with pytest.raises(RequestRefused, match="without a tokenizer"):
        engine.add(asked(1, Grammar(syntax="regex", text="a")))


def test_a_grammar_that_becomes_too_complex_is_closed(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the matcher gives up in the middle, the known closing ends the answer."""
    schema = {"type": "array", "items": {"type": "string"}}
    grammars = loaded.engine._grammars
    assert grammars is not None
    request = asked(4, Grammar(syntax="json_schema", text=json.dumps(schema)), "single", sampling=Sampling())
    closings = loaded.engine.compile(request)._closings  # type: ignore[union-attr]
    original, calls = type(closings).allowed, [0]

    def gives_up(self: Any, matcher: Any) -> Any:
        calls[0] += 1
        if calls[0] < 3:
            return original(self, matcher)
        matcher.consume_token(0)  # the mask: from now on it is in error
        return None

    monkeypatch.setattr(type(closings), "allowed", gives_up)
    output = loaded.engine.generate([request])[0]
    assert calls[0] == 3
    check_answers(loaded, [(request, schema)], [output])


def template_request(seed: int, parts: tuple[int, ...], **changes: Any) -> Request:
    """Holes and fixed text in turn, of these lengths, holes first."""
    template: list[int | None] = []
    for i, length in enumerate(parts):
        template += [None] * length if i % 2 == 0 else range(20 + i, 20 + i + length)
    fields: dict[str, Any] = {"max_tokens": len(template), "template": tuple(template), "ignore_eos": True}
    return asked(seed, None, **fields | {"rollout": True} | changes)


@pytest.mark.parametrize("method", ["single", "multi"])
def test_holes_of_every_length_at_every_alignment(loaded: LoadedModel, method: str) -> None:
    """The fixed text is untouched, each hole is filled, and a forward saw the fixed text behind it in its block: the
    step map says so and replays."""
    requests = [
        template_request(
            1000 * prompt + 100 * hole + fixed,
            (hole, fixed, 2),
            prompt=tuple(range(30, 30 + prompt)),
            decoding=DecodingConfig(block_size=B, **METHODS[method]),
        )
        for prompt in range(1, B + 1)
        for hole in range(1, 2 * B + 2)
        for fixed in (1, 2, B, 2 * B + 1)
    ]
    outputs = loaded.engine.generate(requests)
    vocab_size = len(loaded.tokenizer)
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        assert output.finish_reason == "stop" and output.piece.steps is not None
        pairs = list(zip(request.template, output.tokens, output.piece.steps, strict=True))
        assert all(token == fixed for fixed, token, _ in pairs if fixed is not None)
        assert all((step == 0) == (fixed is not None) for fixed, _, step in pairs)
        assert output.counts.num_tokens == sum(fixed is None for fixed, _, _ in pairs)
        if number % 7 == 0:
            check_replay(loaded.engine.model, request, output, vocab_size=vocab_size)


def test_a_resumed_template_keeps_its_text(loaded: LoadedModel) -> None:
    whole = template_request(7, (5, 6, 3, 2, 4), sampling=Sampling())
    output = loaded.engine.generate([whole])[0]
    for cut in range(1, whole.max_tokens):
        rest = loaded.engine.generate([replace(whole, committed=output.tokens[:cut])])[0]
        fixed = [(a, b) for a, b in zip(whole.template, rest.tokens, strict=True) if a is not None]
        assert rest.tokens[:cut] == output.tokens[:cut] and all(a == b for a, b in fixed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decoding": DecodingConfig(block_size=B, t2t=T2T())}, "cannot be decoded with t2t"),
        ({"ignore_eos": False}, "needs ignore_eos"),
        ({"max_tokens": 5}, "8 positions, not max_tokens=5"),
        ({"template": (4,) * 8}, "has no hole"),
        ({"template": (None, 10**6)}, "outside the vocabulary"),
    ],
)
def test_a_template_that_cannot_be_honoured_is_refused(
    loaded: LoadedModel, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestRefused, match=reason) as caught:
        loaded.engine.add(replace(template_request(1, (5, 3), rollout=False), **changes))
    assert caught.value.field == "template"


@pytest.mark.slow
@pytest.mark.parametrize("number", [24, 1000])
def test_random_schemas_on_the_shipped_model(number: int) -> None:
    with load_engine(model_folder("tiny-mbd"), EngineConfig(max_rows=16, num_pages=800)) as loaded:
        requests = []
        for request, schema in asked_schemas(loaded, number, seed=1):
            decoding = loaded.decoding({"buffer_size": request.decoding.buffer_size, "tau_m2t": 0.9})
            requests.append((replace(request, decoding=decoding), schema))
        outputs = loaded.engine.generate([r for r, _ in requests])
        check_answers(loaded, requests, outputs)
        print(f"\n{number} schemas: {cost(outputs)}")
        for size in sorted({r.decoding.buffer_size for r, _ in requests}):
            of_size = [o for (r, _), o in zip(requests, outputs, strict=True) if r.decoding.buffer_size == size]
            print(f"{len(of_size)} of them with a buffer of {size}: {cost(of_size)}")


ANY_TEXT = Grammar(syntax="regex", text="(?s:.*)")
SOLUTION = Grammar(syntax="regex", text=r"([^\n#]+\n)+#### -?[0-9]+")
BARE_NUMBER = Grammar(syntax="json_schema", text='{"type": "integer"}')


def cost(outputs: list[Output]) -> str:
    tokens, forwards = sum(len(o.tokens) for o in outputs), sum(o.counts.num_forwards for o in outputs)
    return f"{forwards / len(outputs):.2f} forwards an answer, {tokens / forwards:.2f} tokens a forward"


@pytest.mark.slow
@pytest.mark.parametrize("buffer_size", [1, 4])
def test_the_cost_in_forwards(buffer_size: int) -> None:
    """Where a grammar allows what the model would say, it costs no forwards worth naming."""
    with load_engine(model_folder("tiny-mbd"), EngineConfig(max_rows=16, num_pages=800)) as loaded:
        problems = list(itertools.islice(gsm_mini.generate(split="test", seed=0), 100))
        prompts = chat_prompts(loaded.tokenizer, [question(problem["question"]) for problem in problems])
        plain = [
            Request(
                request_id=str(number),
                prompt=tuple(prompt),
                max_tokens=128,
                decoding=loaded.decoding({"buffer_size": buffer_size}),
            )
            for number, prompt in enumerate(prompts)
        ]
        forwards: dict[str, int] = {}
        right: dict[str, int] = {}
        for name, grammar in (("none", None), ("any text", ANY_TEXT), ("solution", SOLUTION), ("number", BARE_NUMBER)):
            outputs = loaded.engine.generate([replace(r, grammar=grammar) for r in plain])
            forwards[name] = sum(o.counts.num_forwards for o in outputs)
            answers = [text_of(loaded, o).split("####")[-1].strip() for o in outputs]
            right[name] = sum(
                a == p["answer"].split("####")[-1].strip() for a, p in zip(answers, problems, strict=True)
            )
            print(f"\nbuffer of {buffer_size}, grammar {name}: {cost(outputs)}, {right[name]} right")
            if name == "solution":
                assert all(re.fullmatch(SOLUTION.text, text_of(loaded, o)) for o in outputs)
        assert forwards["any text"] < 1.05 * forwards["none"]
        assert forwards["solution"] < 1.05 * forwards["none"]
        assert right["solution"] >= right["none"]
