"""LoRA adapters by name in the engine: a row of a mixed batch gets what its adapter gives, merged into the weights."""

import copy
import json
import pickle
import random
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import merged, write_adapter
from fake_attention import FakePackages
from fake_device import fake_device
from small_engines import EOS, MASK, VOCAB, B, build, engine, gist, request, run_with_preemption
from torch.utils._python_dispatch import TorchDispatchMode

from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.work import StepWork
from mbd_core.decoding.causal.planned import planned_decoder
from mbd_core.engine import build as build_module
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel.leader import start_parallel
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.engine.step import vocab as device_vocab
from mbd_core.engine.step.kinds import StepKinds
from mbd_core.models.decoder import Decoder
from mbd_core.ops.attention import choice as attention
from mbd_core.ops.attention import flash
from mbd_core.plain_loops import prefix_rows, run_planned

pytestmark = pytest.mark.usefixtures("warm_followers")

KINDS: dict[str, dict[str, Any]] = {
    "block_causal": {},
    "causal": {"architecture": "NemotronLabsDiffusionModel", "attention": "causal", "qk_norm": False},
    "full": {"architecture": "LLaDAModelLM", "attention": "full", "qk_norm": False},
    "shifted": {
        "architecture": "DreamModel",
        "attention": "full",
        "shift_logits": True,
        "qk_norm": False,
        "qkv_bias": True,
    },
}
METHODS = {
    "block_causal": ("single", "multi", "t2t", "soft"),
    "causal": ("ar", "linear spec", "dlm", "linear spec tau"),
    "full": ("d2f", "quota", "d2f block-causal", "branches"),
    "shifted": ("d2f block-causal", "prefix", "d2f", "leap"),
}
NAMES = ("first", None, "second", "first", "second", None)


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    """In float64, so that no rounding is left that could explain another token."""
    return {kind: build(**changes).double() for kind, changes in KINDS.items()}


@pytest.fixture(scope="module")
def folders(models: dict[str, Decoder], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    base = tmp_path_factory.mktemp("adapters")
    return {
        kind: {
            "first": write_adapter(base / kind / "first", model.config, seed=1, rank=2),
            "second": write_adapter(base / kind / "second", model.config, seed=2, rank=4, use_rslora=True),
        }
        for kind, model in models.items()
    }


def adapted_engine(model: Decoder, folders: dict[str, Path], **changes: Any) -> Engine:
    served = engine(model, **({"max_adapters": 3, "max_rank": 4} | changes))
    for name, folder in folders.items():
        served.load_adapter(name, folder)
    return served


def requests(kind: str) -> list[Request]:
    methods = METHODS[kind]
    return [request(f"r{i}", 100 * i + 7, methods[i % 4], adapter=name) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_mixed_batch_is_the_merged_models(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]], kind: str
) -> None:
    model, batch = models[kind], requests(kind)
    of = {None: model, **{name: merged(model, folder) for name, folder in folders[kind].items()}}
    plain = [gist(engine(model, batch_invariant=False).generate([replace(r, adapter=None)])[0])[0] for r in batch]
    wanted = [engine(of[r.adapter], batch_invariant=False).generate([replace(r, adapter=None)])[0] for r in batch]
    assert sum(p != gist(w)[0] for p, w in zip(plain, wanted, strict=True)) == 4, "the adapters show"
    for static in (False, True):
        served = adapted_engine(
            model, folders[kind], batch_invariant=False, static_shapes=static, overlap=static, max_rows=4
        )
        found = served.generate(batch)
        assert [gist(o)[0] for o in found] == [gist(o)[0] for o in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.piece.logprobs == pytest.approx(other.piece.logprobs, abs=1e-4)
        assert served.scheduler.pool.num_free == served.scheduler.pool.capacity


def test_an_adapter_of_drafts_changes_drafts_alone(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]]
) -> None:
    """Tokens are those without it, forwards those of a plain loop whose drafts come from the merged model."""
    model, folder = models["causal"], folders["causal"]
    drafting, served = merged(model, folder["second"]), adapted_engine(model, folder, batch_invariant=False)
    differ = 0
    for seed in range(4):
        fields = {"max_tokens": 24, "ignore_eos": True, "sampling": Sampling()}
        plain, adapted = (
            request("a", seed, "ar", **fields, decoding=DecodingConfig(block_size=B, causal=causal))
            for causal in (Causal(), Causal(draft_adapter="second"))
        )
        decoder = planned_decoder(adapted, eos_token_ids=(EOS,), vocab=Vocab(MASK, VOCAB), shift=False)
        wanted = run_planned(model, decoder, prefix=prefix_rows(adapted), drafts=drafting)
        without, found = served.generate([plain])[0], served.generate([adapted])[0]
        assert list(found.tokens) == wanted.tokens == list(without.tokens)
        assert found.counts.num_forwards == wanted.num_forwards
        differ += without.counts.num_forwards != wanted.num_forwards
    assert differ, "the adapter shows"
    served.add(adapted)
    with pytest.raises(ValueError, match="while 1 requests use it"):
        served.unload_adapter("second")
    assert served.abort("a") is not None
    served.unload_adapter("second")
    with pytest.raises(RequestRefused, match="'second' is not loaded"):
        served.add(adapted)


@pytest.mark.parametrize("kind", ["block_causal", "causal", "shifted"])
def test_alone_is_in_a_batch_is_preempted_bit_for_bit(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]], kind: str
) -> None:
    model, batch = copy.deepcopy(models[kind]).float(), requests(kind)
    alone = [gist(adapted_engine(model, folders[kind]).generate([r])[0]) for r in batch]
    assert [gist(o) for o in adapted_engine(model, folders[kind]).generate(batch)] == alone
    for overlap in (False, True):
        served = adapted_engine(model, folders[kind], static_shapes=overlap, overlap=overlap)
        assert [gist(o) for o in run_with_preemption(served, batch, random.Random(5))] == alone
    without = [gist(engine(model).generate([r])[0]) for r in batch if r.adapter is None]
    assert without == [a for a, r in zip(alone, batch, strict=True) if r.adapter is None]


def test_pages_are_shared_by_requests_of_one_adapter_alone(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]]
) -> None:
    served = adapted_engine(models["block_causal"], folders["block_causal"])
    asked = request("a", 3, "multi", prompt=tuple(range(2, 30)), max_tokens=8)

    def cached(name: str | None) -> int:
        return served.generate([replace(asked, adapter=name)])[0].counts.num_cached_tokens

    assert [cached(name) for name in (None, "first", "second")] == [0, 0, 0]
    assert [cached(name) for name in (None, "first", "second")] == [24, 24, 24]
    served.unload_adapter("first")
    served.load_adapter("first", folders["block_causal"]["second"])
    assert cached("first") == 0, "another adapter under the same name and in the same slot"


def test_an_adapter_is_loaded_while_others_decode_and_unloaded_when_nobody_uses_it(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]]
) -> None:
    model, folder = models["block_causal"], folders["block_causal"]
    asked = [request(f"r{i}", i, "multi", max_tokens=24, ignore_eos=True) for i in range(3)]
    first, second = (
        gist(engine(merged(model, folder[name]), batch_invariant=False).generate([r])[0])[0]
        for name, r in (("first", asked[0]), ("second", asked[1]))
    )
    served = adapted_engine(
        model,
        {"first": folder["first"]},
        max_rows=1,
        max_adapters=2,
        batch_invariant=False,
        static_shapes=True,
        overlap=True,
    )
    served.add(replace(asked[0], adapter="first"))
    for _ in range(3):
        served.step()
    with pytest.raises(ValueError, match="adapter 'second' is not loaded"):
        served.unload_adapter("second")
    served.load_adapter("second", folder["second"])
    served.add(replace(asked[1], adapter="second"))  # waits: there is one row
    for name in ("first", "second"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be unloaded while 1"):
            served.unload_adapter(name)
    outputs = {}
    while served.has_work:
        outputs |= {step.request_id: step.output.tokens for step in served.step() if step.output is not None}
    assert outputs == {"r0": first, "r1": second}
    served.unload_adapter("first")
    assert [a.name for a in served.adapters] == ["second"]
    with pytest.raises(RequestRefused, match="loaded: second") as caught:
        served.add(replace(asked[0], adapter="first"))
    assert caught.value.field == "adapter"


def test_what_cannot_be_loaded_changes_nothing(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    model, folder = models["block_causal"], folders["block_causal"]["first"]
    none = engine(model)
    with pytest.raises(ValueError, match="start it with max_adapters"):
        none.load_adapter("first", folder)
    with pytest.raises(RequestRefused, match="loaded: none"):
        none.add(request("a", 1, "multi", adapter="first"))
    served = engine(model, max_adapters=1, max_rank=2)
    large = write_adapter(tmp_path / "large", model.config, seed=0, rank=3)
    other = write_adapter(tmp_path / "other", replace(model.config, hidden_size=64), seed=0, rank=1)
    longer = write_adapter(tmp_path / "longer", model.config, seed=0, rank=1)
    (longer / "recipe.json").write_text(json.dumps({"states": {"block_size": 2 * B}, "generation": {}}))
    for name, path, says in (
        ("", folder, "needs a name"),
        ("a", tmp_path, "is not an adapter folder"),
        ("a", large, "r=3 exceeds this engine's max_rank=2"),
        ("a", other, "this model asks for"),
        ("a", longer, f"was trained in blocks of {2 * B}, and this model has blocks of {B}"),
    ):
        with pytest.raises(ValueError, match=says):
            served.load_adapter(name, path)
    assert not list(served.adapters)
    served.load_adapter("a", folder)
    for name, says in (("a", "'a' is loaded already"), ("b", "1 adapters are loaded, which is all that max_adapters")):
        with pytest.raises(ValueError, match=says):
            served.load_adapter(name, folder)
    assert [a.name for a in served.adapters] == ["a"]


def test_an_admitted_request_whose_adapter_is_gone_is_refused(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]]
) -> None:
    served = adapted_engine(models["block_causal"], folders["block_causal"])
    asked = request("a", 1, "multi", adapter="first")
    admitted = served.admission.check(asked)
    elsewhere = pickle.loads(pickle.dumps(served.admission))
    served.unload_adapter("first")
    with pytest.raises(RequestRefused, match="adapter 'first' is not loaded"):
        served.add_admitted(admitted)
    assert not served.has_work
    elsewhere.check(asked)  # a copy leaves the check to the engine, whose adapters come and go
    assert b"first" not in pickle.dumps(served.admission)


class Calls(TorchDispatchMode):
    """Counts operations by name and the shapes they take."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("static", [False, True])
def test_without_a_request_that_uses_one_no_operation_is_added(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]], static: bool
) -> None:
    """To a forward, that is: an engine that loads adapters notes for each row that it has none."""
    model = models["block_causal"]
    batch = [request(f"r{i}", i, "multi") for i in range(4)]
    counts = []
    for served in (
        engine(model, static_shapes=static, batch_invariant=False),
        adapted_engine(model, folders["block_causal"], static_shapes=static, batch_invariant=False),
    ):
        forward, calls = served.runner.forward, Calls()

        def counted(rows: Any, forward: Any = forward, calls: Calls = calls) -> Any:
            assert rows.adapter_T is None
            with calls:
                return forward(rows)

        served.runner.forward = counted  # type: ignore[method-assign]
        served.generate(batch)
        counts.append(calls.counts)
    assert counts[0] == counts[1] and counts[0].total() > 100


@pytest.mark.parametrize("kind", ["block_causal", "causal"])
def test_graphs_captured_before_an_adapter_is_loaded_serve_it(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, batch = models[kind], [r for r in requests(kind) if r.decoding.soft is None][:4]
    sizes = EngineConfig(
        max_rows=2, buffer_size=3, num_pages=60, page_size=16, max_prefill_tokens=12, max_adapters=2, max_rank=4
    )
    wanted_from = Engine(model, sizes)
    for name, folder in folders[kind].items():
        wanted_from.load_adapter(name, folder)
    wanted = [gist(o)[0] for o in wanted_from.generate(batch)]
    with fake_device() as device:
        kernel = flash.vllm_flash(device.kernel(FakePackages().vllm), fa_version=3)
        monkeypatch.setattr(build_module, "resolve", lambda *_, **__: attention.flash_attention("x", kernel, {}))
        monkeypatch.setattr(device_vocab, "FusedVocab", Vocab)
        served = Engine(device.move(copy.deepcopy(model)), sizes)
        captured = served.prepare(batch[1].decoding)
        for name, folder in folders[kind].items():
            served.load_adapter(name, folder)
        assert [gist(o)[0] for o in served.generate(batch)] == wanted
        report = served.graph_report()
    assert report["captured"] == captured and report["steps_replayed"] > 0 == report["steps_eager"]


def test_requests_with_an_adapter_have_graphs_of_their_own_sizes() -> None:
    kinds = StepKinds(max_rows=16, num_slots=4, block_size=32, batch_invariant=False, adapters=True)
    captured = kinds.to_capture(DecodingConfig(block_size=32, buffer_size=4))
    assert len(captured) == len(set(captured)) == 5 * (4 + 4 + 2)
    small = kinds.kind(num_rows=3, num_slots=4, num_asked=100, work=StepWork(adapts=True))
    assert small in captured and small.num_asked is not None
    assert not replace(small, work=StepWork()).covers(small)


def test_two_ranks_serve_adapters_as_one_does(
    models: dict[str, Decoder], folders: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    """Each rank holds its part of the adapters. All ranks load one, or none does."""
    save_model(tmp_path / "model", copy.deepcopy(models["block_causal"]).float())
    batch = requests("block_causal")
    sizes = EngineConfig(max_rows=4, num_pages=60, page_size=8, max_adapters=2, max_rank=4)
    one = Engine(copy.deepcopy(models["block_causal"]).float(), sizes)
    for name, folder in folders["block_causal"].items():
        one.load_adapter(name, folder)
    wanted = one.generate(batch)
    with closing(start_parallel(tmp_path / "model", sizes, size=2, timeout=120)) as served:
        with pytest.raises(ValueError, match="is not an adapter folder"):
            served.load_adapter("first", tmp_path)
        for name, folder in folders["block_causal"].items():
            served.load_adapter(name, folder)
        found = served.generate(batch)
        assert [gist(o)[0] for o in found] == [gist(o)[0] for o in wanted]
        for output, right in zip(found, wanted, strict=True):
            assert output.piece.logprobs == pytest.approx(right.piece.logprobs, abs=1e-3)
        served.unload_adapter("first")
        with pytest.raises(ValueError, match="'first' is not loaded"):
            served.unload_adapter("first")
        served.load_adapter("third", folders["block_causal"]["first"])
        (again,) = served.generate([replace(batch[0], adapter="third")])
        assert again.tokens == wanted[0].tokens
