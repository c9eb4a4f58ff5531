"""Tensor- and expert-parallel workers over gloo on a CPU compute what one worker does: losses, gradients, checkpoints.

What they compute runs in processes of their own (`tests/support/training/training_groups.py`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, random_model
from gloo_workers import started
from training_groups import BASES, alike, gradients, short
from training_pair import losses, run_of, trained

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.run.checkpoints import MARKER
from mbd_core.multitf.step.loss_buckets import BUCKETS
from mbd_core.multitf.step.parallel import check_divides, cut_dim
from mbd_core.multitf.step.workers import ALONE

LIMIT = 600.0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A folder with the models to train."""
    out = tmp_path_factory.mktemp("groups")
    model = load_model(tiny_model_dir)
    tokenizer = load_tokenizer(tiny_model_dir, model.config)
    save_model(out / "model", model, tokenizer=tokenizer)
    config = replace(FAMILIES["llada2"], vocab_size=512, max_positions=512, block_size=4)
    save_model(out / "experts", random_model(config), tokenizer=tokenizer)
    return out


@pytest.fixture(scope="module")
def alone(out: Path) -> dict[str, Any]:
    """One worker's losses and gradient norms; a checkpoint of its third step in `one`."""
    torch.set_num_threads(1)
    found = {}
    for base in ("model", "experts"):
        recipe = short(out / base)
        found[base] = alike(trained(recipe, ALONE, "replicated", str(out / "one") if base == "experts" else None))
    (out / "one" / "step_000004" / MARKER).unlink()
    found["muon"] = alike(trained(short(out / "model", optimizer="muon"), ALONE, "replicated"))
    return found


@pytest.fixture(scope="module")
def two(out: Path, alone: dict[str, Any]) -> dict[str, Any]:
    with started("training_groups.py", "two", str(out)) as workers:
        assert [worker.wait(LIMIT) for worker in workers] == [0, 0]
    return json.loads((out / "two.json").read_text())


def assert_same_training(
    found: dict[str, list[float]], expected: dict[str, list[float]], *, rel: float = 1e-5
) -> None:
    assert expected["loss"][-1] < expected["loss"][0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=rel)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert found["tokens"] == expected["tokens"]
    assert found["tflop"] == pytest.approx(expected["tflop"])
    for name in BUCKETS:
        assert found[name] == pytest.approx(expected[name], rel=10 * rel), name


@pytest.mark.parametrize("cut", BASES)
def test_two_workers_of_a_group_train_as_one(cut: str, two: dict[str, Any], alone: dict[str, Any]) -> None:
    assert_same_training(two[cut], alone[BASES[cut]])


@pytest.mark.parametrize("cut", BASES)
def test_gradients_are_those_of_one_worker(cut: str, two: dict[str, Any], out: Path) -> None:
    found = torch.load(out / f"{cut}-two.pt")
    expected = gradients(run_of(short(out / BASES[cut]), ALONE, "replicated").trainer)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_gradients(family: str, two: dict[str, Any]) -> None:
    assert 0 < two["families"][family] < 1e-5


@pytest.mark.parametrize("cut", BASES)
def test_each_worker_of_a_group_holds_what_the_plan_says(cut: str, two: dict[str, Any]) -> None:
    weights, held, states, kept = two[f"{cut}-plan"]
    assert (held, kept) == (weights, states)


def test_muon_has_whole_matrices(two: dict[str, Any], alone: dict[str, Any]) -> None:
    assert_same_training(two["muon"], alone["muon"], rel=1e-4)


def test_a_group_computes_in_bfloat16(two: dict[str, Any], alone: dict[str, Any]) -> None:
    (narrow,) = two["bfloat16"]
    assert narrow == pytest.approx(alone["experts"]["loss"][0], rel=1e-2)
    assert narrow != pytest.approx(alone["experts"]["loss"][0], rel=1e-6)


def test_one_worker_goes_on_from_a_group_s_checkpoint_and_a_group_from_one_s(
    out: Path, two: dict[str, Any], alone: dict[str, Any]
) -> None:
    assert two["from-one"][:3] == alone["experts"]["loss"][:3]
    assert two["from-one"] == pytest.approx(alone["experts"]["loss"], rel=1e-5)
    for cut, base in BASES.items():
        (out / f"{cut}-two" / "step_000004" / MARKER).unlink()
        recipe = short(out / base)
        again = losses(trained(recipe, ALONE, "replicated", str(out / f"{cut}-two")))
        assert again[:3] == two[cut]["loss"][:3]
        assert again == pytest.approx(alone[base]["loss"], rel=1e-5)


@pytest.mark.parametrize("cut", BASES)
def test_a_group_s_model_is_written_whole(cut: str, two: dict[str, Any], out: Path) -> None:
    read, written = load_model(out / BASES[cut], dtype=torch.bfloat16), load_model(out / f"{cut}-written")
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, written.state_dict()[name]), name


@pytest.mark.slow
def test_two_groups_of_two_train_as_one_worker(out: Path, alone: dict[str, Any]) -> None:
    with started("training_groups.py", "four", str(out), count=4) as workers:
        assert [worker.wait(LIMIT) for worker in workers] == [0] * 4
    four = json.loads((out / "four.json").read_text())
    for cut, base in BASES.items():
        assert_same_training(four[cut], alone[base])
        weights, held, states, kept = four[f"{cut}-plan"]
        assert (held, kept) == (weights, states)
        (out / f"{cut}-four" / "step_000004" / MARKER).unlink()
        recipe = short(out / base)
        again = losses(trained(recipe, ALONE, "replicated", str(out / f"{cut}-four")))
        assert again == pytest.approx(alone[base]["loss"], rel=1e-5)


def test_a_size_that_does_not_divide_is_named() -> None:
    for size, cut, sentence in (
        (4, "expert", "num_key_value_heads=2 of the model does not divide among --tensor-parallel 4 workers"),
        (16, "expert", "num_key_value_heads=2 of the model"),
    ):
        with pytest.raises(ValueError, match=sentence):
            check_divides(FAMILIES["llada2"], size, cut)
    heads = replace(FAMILIES["llada2"], num_heads=12, num_kv_heads=12)
    with pytest.raises(ValueError, match="num_experts=8"):
        check_divides(heads, 3, "expert")
    with pytest.raises(ValueError, match="moe_intermediate_size=6"):
        check_divides(heads, 4, "width")
    check_divides(heads, 4, "expert")
    check_divides(heads, 3, "width")


def test_where_tensors_are_cut() -> None:
    names = random_model(FAMILIES["llada2"]).state_dict()
    for cut, dims in (("expert", (0, 0)), ("width", (1, 2))):
        found = {name: cut_dim(name, cut) for name in names}
        assert {
            found["model.embed_tokens.weight"],
            found["lm_head.weight"],
            found["model.layers.1.mlp.gate.weight"],
        } == {None}
        assert (found["model.layers.1.mlp.experts.up_proj"], found["model.layers.1.mlp.experts.down_proj"]) == dims
        assert found["model.layers.1.mlp.shared_experts.down_proj.weight"] == 1
        assert found["model.layers.0.self_attn.q_proj.weight"] == 0
