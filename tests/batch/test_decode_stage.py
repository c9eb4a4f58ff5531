"""The decoding stage: one engine in memory at a time, failures stay with their rows, texts are the endpoint's."""

import gc
import json
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from sweep_rows import planned_samples

from mbd_core.batch.decoding import DecodeStage
from mbd_core.batch.decoding_model import DecodingModel, ModelRefused
from mbd_core.batch.rows import COUNTS, PLANNED_COLUMNS
from mbd_core.checkpoint.chat import decode_text
from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.serving.text.committed import CommittedText
from mbd_core.serving.tokens.load import load_engine

SIZES = EngineConfig(max_rows=4, buffer_size=4, num_pages=128)
BROKEN = "broken on purpose"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects die with their last reference or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def load(folder: Path) -> Callable[[str], DecodingModel]:
    """The model of `folder` under any name, on the device that a sweep takes."""

    def model(_name: str) -> DecodingModel:
        loaded = load_engine(folder, SIZES)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    return model


class FakeEngine:
    """Answers every request with `answer`; `generate` fails for a batch that holds a request of `failing`."""

    def __init__(self, *, failing: set[str], answer: list[int]) -> None:
        self.failing, self.answer, self.closed = failing, answer, False
        self.admission = SimpleNamespace(check=lambda request: request, max_positions=512)

    def generate(self, requests: list[Request]) -> list[Output]:
        assert not self.closed
        if self.failing & {request.request_id for request in requests}:
            raise RuntimeError(BROKEN)
        counts = Counts(
            num_prompt_tokens=1,
            num_tokens=len(self.answer),
            num_forwards=1,
            num_store_forwards=0,
            num_prefill_forwards=1,
            decode_seconds=1.0,
        )
        piece = Piece(tokens=tuple(self.answer), steps=(1,) * len(self.answer))
        return [Output(request_id=r.request_id, finish_reason="stop", counts=counts, piece=piece) for r in requests]

    def forget_prefixes(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakeLoader:
    """Loads fake engines; `most_alive` is the number of engines that were ever alive together."""

    def __init__(self, tokenizer: Any, *, failing: Collection[str] = (), answer: Sequence[int] = (5,)) -> None:
        self.tokenizer, self.failing, self.answer = tokenizer, set(failing), list(answer)
        self.alive: weakref.WeakSet[FakeEngine] = weakref.WeakSet()
        self.names: list[str] = []
        self.most_alive = 0

    def __call__(self, name: str) -> DecodingModel:
        engine = FakeEngine(failing=self.failing, answer=self.answer)
        self.alive.add(engine)
        self.names.append(name)
        self.most_alive = max(self.most_alive, len(self.alive))
        return DecodingModel(engine, self.tokenizer)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    from mbd_core.checkpoint.folder import read_folder

    return read_folder(tiny_model_dir).tokenizer


# -- one engine at a time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [set(), {"1"}, {"0", "1", "2"}])
def test_one_engine_is_alive_at_a_time_whatever_fails(no_collector: None, tokenizer: Any, failing: set[str]) -> None:
    loader = FakeLoader(tokenizer, failing=failing)
    rows = DecodeStage(loader)(planned_samples(["m"], prompts=["a", "b", "c"])).to_pylist()
    assert loader.most_alive == 1
    assert {str(row["sample"]) for row in rows if row["error"] == f"RuntimeError: {BROKEN}"} == failing
    assert len(loader.names) == (1 if not failing else 1 + len(failing) + (failing != {"0", "1", "2"}))


def test_one_model_is_in_memory_at_a_time(no_collector: None, tokenizer: Any) -> None:
    loader = FakeLoader(tokenizer)
    table = planned_samples(["first", "second"], prompts=["a", "b"])
    stage = DecodeStage(loader)
    assert all(row["error"] is None for row in stage(table).to_pylist())
    assert (loader.names, loader.most_alive, len(loader.alive)) == (["first", "second"], 1, 1)
    stage.close()
    assert len(loader.alive) == 0


def test_the_engine_itself_dies_with_its_failure(
    no_collector: None, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the stage must forget an engine, nothing inside the engine may keep it alive."""
    engines: list[weakref.ref[Engine]] = []

    def counting(name: str) -> DecodingModel:
        assert [engine() for engine in engines] == [None] * len(engines), "an engine is loaded beside another"
        model = load(tiny_model_dir)(name)
        engines.append(weakref.ref(model.engine))
        return model

    monkeypatch.setattr(Engine, "generate", failing_for("1", Engine.generate))
    rows = DecodeStage(counting)(planned_samples(["m"], prompts=["a", "b", "c"], buffer_sizes=[2])).to_pylist()
    assert [row["error"] for row in rows] == [None, f"RuntimeError: {BROKEN}", None]
    assert len(engines) == 3


@pytest.mark.gpu
def test_running_out_of_gpu_memory_does_not_cascade(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine takes more than half of the card, so that two never fit; one request asks for too much."""
    total = torch.cuda.get_device_properties(0).total_memory
    generate = Engine.generate

    def greedy(self: Engine, requests: list[Request]) -> list[Output]:
        self.ballast = torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")  # type: ignore[attr-defined]
        if any(request.request_id == "1" for request in requests):
            torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", greedy)
    rows = DecodeStage(load(tiny_model_dir))(planned_samples(["m"], prompts=["a", "b", "c"])).to_pylist()
    assert rows[0]["error"] is None and rows[2]["error"] is None
    assert rows[1]["error"].startswith("OutOfMemoryError")


# -- failures -------------------------------------------------------------------------------------------------------


def failing_for(request_id: str, generate: Callable[..., list[Output]]) -> Callable[..., list[Output]]:
    def failing(self: Engine, requests: list[Request]) -> list[Output]:
        if any(request.request_id == request_id for request in requests):
            raise RuntimeError(BROKEN)
        return generate(self, requests)

    return failing


def test_an_engine_s_failure_is_the_row_s_that_caused_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = planned_samples(["m"], prompts=["a", "b", "c"], buffer_sizes=[2])
    undisturbed = [row["text"] for row in DecodeStage(load(tiny_model_dir))(table).to_pylist()]
    monkeypatch.setattr(Engine, "generate", failing_for("1", Engine.generate))
    rows = DecodeStage(load(tiny_model_dir))(table).to_pylist()
    assert [row["error"] for row in rows] == [None, f"RuntimeError: {BROKEN}", None]
    assert [rows[0]["text"], rows[2]["text"]] == [undisturbed[0], undisturbed[2]]


def test_a_model_that_cannot_be_loaded_is_not_a_row_s_failure(tokenizer: Any) -> None:
    def load(_name: str) -> DecodingModel:
        raise ValueError("no such weights")

    with pytest.raises(ModelRefused, match="model 'm': no such weights"):
        DecodeStage(load)(planned_samples(["m"], prompts=["a"]))


# -- what comes out -------------------------------------------------------------------------------------------------


def test_configurations_mixed_in_a_batch_decode_as_each_alone(tiny_model_dir: Path) -> None:
    table = planned_samples(["m"], prompts=["How many?", "Tom has 3 pens."], buffer_sizes=[1, 2, 4])
    together = DecodeStage(load(tiny_model_dir))(table).to_pylist()
    one_at_a_time = DecodeStage(load(tiny_model_dir))
    for number, row in enumerate(together):
        (alone,) = one_at_a_time(table.slice(number, 1)).to_pylist()
        assert alone["text"] == row["text"]
        assert [alone[name] for name in COUNTS] == [row[name] for name in COUNTS]
    assert len({row["num_forwards"] for row in together}) > 1, "the configurations should differ in forwards"


def test_configurations_of_one_prompt_share_its_prefix(tiny_model_dir: Path) -> None:
    prompts = [f"{number} " + "How many pens has Tom? " * 12 for number in range(4)]
    loaded = load(tiny_model_dir)("m")
    DecodeStage(lambda _: loaded)(planned_samples(["m"], prompts=prompts, buffer_sizes=[1, 2, 3, 4]))
    measures = loaded.engine.measures()
    length, page_size = measures.prefix_queries // 16, loaded.engine.page_size
    whole = length // page_size * page_size
    assert measures.prefix_hits == 12 * whole > 0, "only the first of four configurations computes a prompt"


def test_the_text_is_what_the_endpoint_makes_of_the_tokens(tokenizer: Any) -> None:
    """Special tokens inside an answer are left out, and the spaces before punctuation stay."""
    answer = tokenizer("Tom has 12 pens , he said .", add_special_tokens=False)["input_ids"]
    answer = [*answer[:3], *tokenizer.all_special_ids, *answer[3:]]
    endpoint = CommittedText(partial(decode_text, tokenizer))
    streamed = "".join([*(endpoint.push(token) for token in answer), endpoint.finish()])
    loader = FakeLoader(tokenizer, answer=answer)
    (row,) = DecodeStage(loader)(planned_samples(["m"], prompts=["a"])).to_pylist()
    assert row["text"] == streamed == "Tom has 12 pens , he said ."


def test_an_answer_gets_the_tokens_that_the_model_holds_and_ends_before_its_stop_string(tiny_model_dir: Path) -> None:
    rows = planned_samples(["m"], prompts=["How many?"]).to_pylist() * 4
    whole, shortened, refused, stopped = (dict(row, sample=n, max_tokens=4096) for n, row in enumerate(rows))
    whole.update(max_tokens=40)
    shortened.update(may_shorten=True)
    (first,) = DecodeStage(load(tiny_model_dir))(pa.Table.from_pylist([whole], schema=PLANNED_COLUMNS)).to_pylist()
    stop = first["text"][5:9]
    stopped.update(max_tokens=40, stop=json.dumps([stop, "none of these"]))
    table = pa.Table.from_pylist([whole, shortened, refused, stopped], schema=PLANNED_COLUMNS)
    whole, shortened, refused, stopped = DecodeStage(load(tiny_model_dir))(table).to_pylist()
    assert whole["text"] == first["text"] and whole["max_tokens"] == 40
    assert shortened["error"] is None and 400 < shortened["max_tokens"] < 512
    assert refused["max_tokens"] == 4096 and "exceed the model's 512 positions" in refused["error"]
    assert stopped["text"] == first["text"][: first["text"].index(stop)] and stopped["finish_reason"] == "stop"
    assert stopped["num_tokens"] < whole["num_tokens"]


def test_a_row_has_each_token_s_text_and_the_forward_that_accepted_it(tiny_model_dir: Path) -> None:
    rows = planned_samples(["m"], prompts=["How many?"], buffer_sizes=[1, 4]).to_pylist()
    single, several = (dict(row, max_tokens=40) for row in rows)
    edits = json.dumps({**json.loads(single["config"]), "t2t": {"tau": 0.03}})
    planned = [single, several, dict(single, sample=2, config=edits), dict(single, sample=3, max_tokens=4096)]
    table = pa.Table.from_pylist(planned, schema=PLANNED_COLUMNS)
    decoded = DecodeStage(load(tiny_model_dir))(table).to_pylist()
    for row in decoded[:2]:
        assert row["error"] is None and len(row["pieces"]) == len(row["steps"]) == row["num_tokens"] > 20
        assert min(row["steps"]) == 1 and max(row["steps"]) <= row["num_forwards"]
        assert "".join(row["pieces"]).split() == row["text"].split()
    offset = decoded[0]["num_prompt_tokens"]
    one, many = (
        [(offset + number) // 4 for number in sorted(range(row["num_tokens"]), key=row["steps"].__getitem__)]
        for row in decoded[:2]
    )
    assert one == sorted(one) and many != sorted(many), "with several slots a block is begun before another is done"
    stopped = dict(several, stop=json.dumps([decoded[1]["text"][5:9]]))
    (row,) = DecodeStage(load(tiny_model_dir))(pa.Table.from_pylist([stopped], schema=PLANNED_COLUMNS)).to_pylist()
    assert row["num_tokens"] < 40 and row["steps"] == decoded[1]["steps"][: row["num_tokens"]]
    assert row["pieces"] == decoded[1]["pieces"][: row["num_tokens"]]
    edited, failed = decoded[2:]
    assert len(edited["steps"]) == len(edited["pieces"]) == edited["num_tokens"] > 20
    assert edited["edits"] and decoded[0]["edits"] is None, "only what was overwritten is an edit"
    for edit in edited["edits"]:
        assert edit["step"] < edited["steps"][edit["index"]] and edit["piece"] != ""
    assert failed["error"] is not None and failed["pieces"] is failed["steps"] is failed["edits"] is None
