"""Other weights for an engine that serves: in place, between two steps, without losing a request."""

import copy
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_attention import FakePackages
from fake_device import fake_device
from family_models import rewrite
from small_engines import EXPERTS, build, engine, gist, request
from torch import Tensor

from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.engine import build as build_module
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel import leader
from mbd_core.engine.parallel.follow import run_follower
from mbd_core.engine.parallel.group import Rank
from mbd_core.engine.parallel.leader import start_parallel
from mbd_core.engine.step import vocab as device_vocab
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts
from mbd_core.models.quantize import quantize_weights, round_to_int8
from mbd_core.ops.attention import choice as attention
from mbd_core.ops.attention import flash

pytestmark = pytest.mark.usefixtures("warm_followers")

FAMILIES: dict[str, dict[str, Any]] = {
    "sdar": {},
    "llada2": {"architecture": "LLaDA2MoeModelLM", "moe": EXPERTS},
    "llada": {"architecture": "LLaDAModelLM", "attention": "full", "qk_norm": False},
    "dream": {
        "architecture": "DreamModel",
        "attention": "full",
        "shift_logits": True,
        "qk_norm": False,
        "qkv_bias": True,
    },
}


def other(model: Decoder) -> Decoder:
    """A model of the same shapes in which every number is another, gains and routing offsets included."""
    out = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for tensor in out.state_dict().values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.2)
    return out


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Decoder, Decoder]]:
    """Of each family the old weights and the new ones."""
    out = {}
    for family, changes in FAMILIES.items():
        old = build(**changes)
        out[family] = old, other(old)
    return out


@pytest.fixture(scope="module")
def folders(models: dict[str, tuple[Decoder, Decoder]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The new weights of each family."""
    base = tmp_path_factory.mktemp("models")
    for family, (_, new) in models.items():
        save_model(base / family, new)
    return {family: base / family for family in models}


def engine_of(model: Decoder, **changes: Any) -> Engine:
    """An engine of its own copy of the model."""
    return engine(copy.deepcopy(model), **changes)


def memory(model: Decoder) -> dict[str, tuple[int, bytes]]:
    """Where each tensor is, and what it holds."""
    tensors = model.state_dict().items()
    return {name: (t.data_ptr(), t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in tensors}


def batch(method: str = "multi", count: int = 5, **changes: Any) -> list[Request]:
    return [request(f"r{i}", 30 * i + 7, method, **{"max_tokens": 30, **changes}) for i in range(count)]


def run(
    served: Engine, until: Callable[[Engine], bool] = lambda _: False, *, most: int = 1_000
) -> dict[str, list[StepOutput]]:
    """At most `most` steps, until nothing is left to do, or `until`; the steps of each request."""
    steps: dict[str, list[StepOutput]] = {}
    for _ in range(most):
        if not served.has_work or until(served):
            break
        for step in served.step():
            steps.setdefault(step.request_id, []).append(step)
        served.check_integrity()
    return steps


def joined(*parts: dict[str, list[StepOutput]]) -> dict[str, Output]:
    """The outputs, which say what was handed out step by step."""
    outputs = {}
    for name in {n for part in parts for n in part}:
        steps = [step for part in parts for step in part.get(name, [])]
        output = steps[-1].output
        assert output is not None and all(step.output is None for step in steps[:-1])
        assert output.tokens == tuple(t for step in steps for t in step.piece.tokens)
        outputs[name] = output
    return outputs


@pytest.mark.parametrize(
    ("family", "batch_invariant"),
    [
        ("sdar", True),
        ("sdar", False),
        pytest.param("llada2", True, marks=pytest.mark.slow),
        ("llada2", False),
        pytest.param("llada", True, marks=pytest.mark.slow),
        ("llada", False),
        ("dream", True),
        pytest.param("dream", False, marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_other_weights_is_an_engine_of_these_weights(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], family: str, batch_invariant: bool
) -> None:
    """Bit for bit, and where the old weights were: a graph reads them at their address."""
    old, new = models[family]
    method = "multi" if family in ("sdar", "llada2") else "d2f"
    served = engine_of(old, batch_invariant=batch_invariant)
    before = served.generate(batch(method))
    addresses = {n: t.data_ptr() for n, t in served.model.state_dict().items()}
    served.update_weights(folders[family])
    assert served.weights_version == 1 and not served.swap_waits
    fresh = engine_of(new, batch_invariant=batch_invariant).generate(batch(method))
    assert [gist(o) for o in served.generate(batch(method))] == [gist(o) for o in fresh] != [gist(o) for o in before]
    assert {n: t.data_ptr() for n, t in served.model.state_dict().items()} == addresses
    served.update_weights((name, tensor) for name, tensor in old.state_dict().items())
    assert [gist(o) for o in served.generate(batch(method))] == [gist(o) for o in before]
    assert served.weights_version == 2


@pytest.mark.parametrize(("family", "parts"), [("sdar", "all"), ("dream", "all"), ("llada2", "experts")])
def test_fp8_weights_are_rounded_anew(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], family: str, parts: Fp8Parts
) -> None:
    old, new = (quantize_weights(copy.deepcopy(model), parts) for model in models[family])
    served, fresh = engine(old), engine(new)
    method = "d2f" if family == "dream" else "multi"
    served.update_weights(folders[family])
    assert [gist(o) for o in served.generate(batch(method))] == [gist(o) for o in fresh.generate(batch(method))]
    wanted = memory(fresh.model)
    assert {n: held for n, (_, held) in memory(served.model).items()} == {n: held for n, (_, held) in wanted.items()}


@pytest.mark.parametrize("family", ["sdar", "llada2", "dream"])
def test_int8_weights_are_rounded_anew(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], family: str
) -> None:
    served, fresh = (engine(round_to_int8(copy.deepcopy(model))) for model in models[family])
    places = {name: place for name, (place, _) in memory(served.model).items()}
    served.update_weights(folders[family])
    method = "d2f" if family == "dream" else "multi"
    assert [gist(o) for o in served.generate(batch(method))] == [gist(o) for o in fresh.generate(batch(method))]
    held = memory(served.model)
    assert {n: content for n, (_, content) in held.items()} == {n: c for n, (_, c) in memory(fresh.model).items()}
    assert {n: place for n, (place, _) in held.items()} == places


@pytest.mark.parametrize(
    ("family", "overlap"),
    [
        pytest.param("sdar", False, marks=pytest.mark.slow),
        ("sdar", True),
        ("dream", False),
        pytest.param("dream", True, marks=pytest.mark.slow),
    ],
)
def test_the_same_weights_again_change_nothing(
    models: dict[str, tuple[Decoder, Decoder]], family: str, overlap: bool
) -> None:
    """Swaps at any moment, under load: what was committed stays, and what is open goes on, bit for bit."""
    model, _ = models[family]
    asked = batch("multi" if family == "sdar" else "d2f block-causal", 6)
    wanted = {r.request_id: gist(engine_of(model).generate([r])[0]) for r in asked}
    served = engine_of(model, max_rows=3, num_pages=60, static_shapes=overlap, overlap=overlap)
    rng, parts, swaps = random.Random(3), [], 0
    for r in asked:
        served.add(r)
    while served.has_work:
        parts.append(run(served, lambda _: rng.random() < 0.2))
        served.update_weights(model.state_dict().items(), mode="preempt")
        swaps += 1
        assert served.weights_version == swaps and not served.num_running and not served.scheduler.pool.num_cached
        if swaps % 3:
            parts.append(run(served, lambda e: e.num_running == 3))
    outputs = joined(*parts)
    assert {name: gist(o) for name, o in outputs.items()} == wanted and swaps > 5
    assert max(o.counts.num_preemptions for o in outputs.values()) > 1
    assert served.scheduler.pool.num_free == served.scheduler.pool.capacity


def test_preempted_requests_keep_what_they_committed_and_go_on_with_the_new_weights(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path]
) -> None:
    old, new = models["sdar"]
    asked = batch("single", max_tokens=40, ignore_eos=True)
    wanted = {r.request_id: engine_of(old).generate([r])[0] for r in asked}
    served = engine_of(old, max_rows=3)
    for r in asked:
        served.add(r)
    begun = run(served, lambda e: min([s.num_emitted for s in e.scheduler.running.values()], default=0) >= 8)
    served.update_weights(folders["sdar"], mode="preempt")
    outputs = joined(begun, run(served))
    assert len(outputs) == 5 and all(len(o.tokens) == 40 for o in outputs.values())
    for name, output in outputs.items():
        kept = sum(len(step.piece.tokens) for step in begun.get(name, []))
        assert output.tokens[:kept] == wanted[name].tokens[:kept] and (kept >= 8) == (name in ("r0", "r1", "r2"))
        assert output.tokens != wanted[name].tokens and output.counts.num_preemptions == (kept > 0)
    for r in asked[3:]:  # they waited, and are the new weights' alone
        assert outputs[r.request_id].tokens == engine_of(new).generate([r])[0].tokens


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_requests_that_run_may_end_with_the_old_weights_first(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], overlap: bool
) -> None:
    """One that was preempted for lack of pages is one of them; those that wait get the new weights."""
    old, new = models["sdar"]
    asked = batch(count=6, max_tokens=30, ignore_eos=True)
    wanted = [gist(engine_of(old if i < 3 else new).generate([r])[0]) for i, r in enumerate(asked)]
    served = engine_of(old, max_rows=3, static_shapes=overlap, overlap=overlap)
    for r in asked[:5]:
        served.add(r)
    begun = run(served, lambda e: any(s.num_emitted > 0 for s in e.scheduler.running.values()))
    assert served.preempt() == "r2"
    served.update_weights(folders["sdar"], mode="wait")
    assert served.swap_waits and served.weights_version == 0
    with pytest.raises(ValueError, match="other weights still wait"):
        served.update_weights(folders["sdar"])
    served.add(asked[5])
    during = run(served, lambda e: e.weights_version == 1)
    assert {n for n, steps in during.items() if steps[-1].output} == {"r0", "r1", "r2"} and served.num_known == 3
    outputs = joined(begun, during, run(served))
    assert [gist(outputs[r.request_id]) for r in asked] == wanted


def test_weights_that_wait_take_their_place_when_the_last_request_ends_or_is_aborted(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path]
) -> None:
    for aborted in (False, True):
        served = engine_of(models["sdar"][0])
        served.add(batch(count=1)[0])
        served.step()
        served.update_weights(folders["sdar"], mode="wait")
        assert served.swap_waits
        if aborted:
            assert served.abort("r0") is not None
        else:
            run(served)
        assert served.weights_version == 1 and not served.has_work and not served.swap_waits


@pytest.mark.parametrize("mode", ["wait", "preempt"])
def test_a_canvas_that_has_given_out_tokens_does_not_take_them_back(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], mode: Any
) -> None:
    old, new = models["llada"]
    canvas, blocks = request("c", 5, "quota", ignore_eos=True), request("b", 6, "d2f", max_tokens=30, ignore_eos=True)
    late = replace(canvas, request_id="late")
    served = engine_of(old)
    served.add(canvas)
    begun = run(served, lambda e: bool(e.scheduler.find("c").num_emitted))
    served.add(blocks)
    more = run(served, most=1)
    served.update_weights(folders["llada"], mode=mode)
    assert served.swap_waits
    served.add(late)
    outputs = joined(begun, more, run(served))
    assert gist(outputs["c"]) == gist(engine_of(old).generate([canvas])[0])
    assert gist(outputs["late"]) == gist(engine_of(new).generate([late])[0]) != gist(outputs["c"])
    assert served.weights_version == 1 and len(outputs["b"].tokens) == 30


def test_a_canvas_that_has_given_out_nothing_begins_anew(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path]
) -> None:
    old, new = models["llada"]
    canvas = request("c", 5, "quota", ignore_eos=True)
    served = engine_of(old)
    served.add(canvas)
    assert served.step() == []
    served.update_weights(folders["llada"])
    assert served.weights_version == 1
    assert gist(joined(run(served))["c"]) == gist(engine_of(new).generate([canvas])[0])


def test_no_page_of_the_old_weights_is_shared(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path]
) -> None:
    served = engine_of(models["sdar"][0])
    asked = request("a", 3, "multi", prompt=tuple(range(2, 30)), max_tokens=8)
    assert [served.generate([asked])[0].counts.num_cached_tokens for _ in range(2)] == [0, 24]
    served.update_weights(folders["sdar"])
    assert served.scheduler.pool.num_cached == 0
    assert [served.generate([asked])[0].counts.num_cached_tokens for _ in range(2)] == [0, 24]


def spoiled(state: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    whole = {**state, **changes}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({K: None}, f"the new weights lack a tensor of this model: '{K}'"),
        ({"more": torch.zeros(2)}, "the new weights have a tensor that this model lacks: 'more'"),
        ({K: torch.zeros(16, 31)}, rf"'{K}' has shape \(16, 31\); the model asks for \(16, 32\)"),
        ({K: torch.full((16, 32), torch.inf)}, f"'{K}' has values that are not finite"),
    ],
)
def test_tensors_that_do_not_fit_change_no_byte(
    models: dict[str, tuple[Decoder, Decoder]], changes: dict[str, Tensor | None], says: str
) -> None:
    served = engine_of(models["sdar"][0])
    before = memory(served.model)
    with pytest.raises(ValueError, match=says):
        served.update_weights(spoiled(models["sdar"][1].state_dict(), **changes).items())
    assert memory(served.model) == before and served.weights_version == 0 and not served.swap_waits


def test_a_folder_that_does_not_fit_changes_no_byte(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], tmp_path: Path
) -> None:
    old, new = models["sdar"]
    bad = copy.deepcopy(new)
    with torch.no_grad():
        bad.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    save_model(tmp_path / "nan", bad)
    save_model(tmp_path / "theta", new)
    rewrite(tmp_path / "theta" / "config.json", rope_theta=5e5)
    (tmp_path / "cut").mkdir()
    for file in (tmp_path / "nan").iterdir():
        data = file.read_bytes()
        (tmp_path / "cut" / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    served = engine_of(old)
    served.add(batch(count=1)[0])
    served.step()
    before = memory(served.model)
    for source, says in (
        (tmp_path / "none", "is not a model folder"),
        (Path("a" * 4000), "the folder of the weights cannot be read: .*name too long"),
        (tmp_path / "nan", "down_proj.weight' has values that are not finite"),
        (tmp_path / "cut", "is damaged or cut short"),
        (tmp_path / "theta", "its rope_theta is 500000.0, the model's 10000.0"),
        (folders["dream"], "its architecture is DreamModel, the model's SDARForCausalLM"),
    ):
        with pytest.raises(ValueError, match=says):
            served.update_weights(source)
    with pytest.raises(ValueError, match=r"mode='now' .*wait, preempt"):
        served.update_weights(folders["sdar"], mode="now")  # type: ignore[arg-type]
    assert memory(served.model) == before
    outputs = joined(run(served))
    assert gist(outputs["r0"]) == gist(engine_of(old).generate(batch(count=1))[0])


def test_captured_graphs_compute_with_the_new_weights(
    models: dict[str, tuple[Decoder, Decoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (copy.deepcopy(model).double() for model in models["sdar"])
    asked, sizes = batch(count=2), EngineConfig(max_rows=1, num_pages=50, page_size=16, max_prefill_tokens=12)
    wanted = [[gist(o)[0] for o in Engine(copy.deepcopy(m), sizes).generate(asked)] for m in (old, new)]
    with fake_device() as device:
        kernel = flash.vllm_flash(device.kernel(FakePackages().vllm), fa_version=3)
        monkeypatch.setattr(build_module, "resolve", lambda *_, **__: attention.flash_attention("x", kernel, {}))
        monkeypatch.setattr(device_vocab, "FusedVocab", Vocab)
        served = Engine(device.move(copy.deepcopy(old)), sizes)
        served.prepare(asked[0].decoding)
        found = [[gist(o)[0] for o in served.generate(asked)]]
        served.update_weights(new.state_dict().items())
        found.append([gist(o)[0] for o in served.generate(asked)])
        report = served.graph_report()
    assert found == wanted and wanted[0] != wanted[1]
    assert report["steps_replayed"] > 0 == report["steps_eager"]


@pytest.mark.parametrize("family", ["sdar", pytest.param("llada2", marks=pytest.mark.slow)])
def test_all_ranks_swap_between_the_same_steps(
    models: dict[str, tuple[Decoder, Decoder]], folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Under load and idle, folders and tensors. The follower compares its state with rank 0's before every step."""
    old, new = models[family]
    save_model(tmp_path / "old", old)
    sizes = EngineConfig(max_rows=3, num_pages=60, page_size=8, max_prefill_tokens=12)
    asked = batch("multi", max_tokens=20, ignore_eos=True)
    one, found = Engine(copy.deepcopy(old), sizes), []
    with closing(start_parallel(tmp_path / "old", sizes, size=2, timeout=120)) as two:
        for served in (one, two):
            with pytest.raises(ValueError, match="is not a model folder"):
                served.update_weights(tmp_path)
            for r in asked:
                served.add(r)
            begun = run(served, lambda e: any(s.num_emitted > 0 for s in e.scheduler.running.values()))
            served.update_weights(folders[family], mode="preempt")
            middle = run(served, most=3)
            served.update_weights(tmp_path / "old", mode="wait")
            assert served.swap_waits
            outputs = joined(begun, middle, run(served))
            assert served.weights_version == 2
            served.update_weights(folders[family])
            later = [o.tokens for o in served.generate(asked)]
            for bad, says in ((K, "lack a tensor"), ("model.norm.weight", "not finite")):
                spoil = None if bad == K else torch.full((32,), torch.nan)
                with pytest.raises(ValueError, match=says):
                    served.update_weights(spoiled(old.state_dict(), **{bad: spoil}).items())
            served.update_weights(old.state_dict().items(), version=9)
            assert served.weights_version == 9
            tensors = [o.tokens for o in served.generate(asked)]
            found.append(({name: o.tokens for name, o in sorted(outputs.items())}, later, tensors))
    assert found[0] == found[1]
    for model, tokens in ((new, found[0][1]), (old, found[0][2])):
        assert tokens == [o.tokens for o in Engine(copy.deepcopy(model), sizes).generate(asked)]


def test_weights_that_one_rank_cannot_read_change_none(
    models: dict[str, tuple[Decoder, Decoder]],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model(tmp_path / "old", models["sdar"][0])
    monkeypatch.setattr(leader, "run_follower", run_follower_on_a_bad_disk)
    sizes = EngineConfig(max_rows=3, num_pages=60, page_size=8)
    with closing(start_parallel(tmp_path / "old", sizes, size=2, timeout=120)) as served:
        before = memory(served.model)
        with pytest.raises(ValueError, match="rank 1: the disk is gone"):
            served.update_weights(folders["sdar"])
        assert memory(served.model) == before and served.weights_version == 0
        assert len(served.generate(batch())) == 5


def run_follower_on_a_bad_disk(folder: Path, rank: Rank, dtype: torch.dtype | None, fp8: Fp8Parts | None) -> None:
    def no_weights(*_: Any) -> None:
        raise OSError("the disk is gone")

    Engine._stage = no_weights  # type: ignore[method-assign, assignment]
    run_follower(folder, rank, dtype, fp8)
