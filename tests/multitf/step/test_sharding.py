"""Two workers over gloo on a CPU: sharded and replicated weights train the same, from each other's checkpoints too.

What they compute runs in two processes at once (`tests/support/training/training_pair.py`); one is the comparison.
"""

import json
import random
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from family_models import FAMILIES, random_model
from gloo_workers import started
from torch.distributed.checkpoint import FileSystemReader
from training_pair import (
    KEPT,
    STEPS,
    distilled,
    half_denoised,
    held_out,
    losses,
    next_tokens,
    recipe_on,
    trained,
    trained_adapter,
)
from warm_python import WarmPython

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.run.checkpoints import MARKER
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.step.workers import ALONE

LIMIT = 300.0
CLOSE = {"adamw": 1e-5, "muon": 1e-4}
"""Workers add up gradients in another order than one does: after 8 updates losses differ by less than this.

Muon orthogonalises in bfloat16, where a small difference can become a rounding step.
"""


def pair(mode: str, out: Path, **environment: str) -> AbstractContextManager[list[WarmPython]]:
    return started("training_pair.py", mode, str(out), environment=environment)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A folder with the models to train, and checkpoints that one worker wrote after its third step."""
    out = tmp_path_factory.mktemp("pair")
    model = load_model(tiny_model_dir)
    tokenizer = load_tokenizer(tiny_model_dir, model.config)
    save_model(out / "model", model, tokenizer=tokenizer)
    config = FAMILIES["llada2"]
    sizes = {"vocab_size": 512, "max_positions": 512, "block_size": 4}
    save_model(out / "experts", random_model(replace(config, **sizes)), tokenizer=tokenizer)
    save_model(out / "dream", random_model(replace(FAMILIES["dream"], **sizes)), tokenizer=tokenizer)
    return out


@pytest.fixture(scope="module")
def alone(out: Path) -> dict[str, Any]:
    """The losses of one worker."""
    torch.set_num_threads(1)
    recipes = {name: recipe_on(out / "model", optimizer=name) for name in ("adamw", "muon")}
    found = {name: losses(trained(recipe, ALONE, "replicated")) for name, recipe in recipes.items()}
    found["experts"] = losses(trained(recipe_on(out / "experts", steps=2), ALONE, "replicated"))
    found["packed"] = losses(trained(recipe_on(out / "model", steps=2), ALONE, "replicated"))
    found["half"] = losses(trained(half_denoised(out / "model"), ALONE, "replicated"))
    found["ar"] = losses(trained(next_tokens(out / "model", alone=True), ALONE, "replicated"))
    found["ar-beside"] = losses(trained(next_tokens(out / "model", alone=False), ALONE, "replicated"))
    found["held-out"] = held_out(recipe_on(out / "model"), ALONE, "replicated")
    found["adapter"] = trained_adapter(distilled(out / "dream"), ALONE, "replicated", out / "adapter-alone")
    trained(recipes["muon"], ALONE, "replicated", str(out / "one"))
    for step in (6, STEPS):
        (out / "one" / f"step_{step:06d}" / MARKER).unlink()
    return found


@pytest.fixture(scope="module")
def together(out: Path, alone: dict[str, list[float]], s3_server: dict[str, str]) -> dict[str, Any]:
    with pair("compare", out, **s3_server) as workers:
        assert [worker.wait(LIMIT) for worker in workers] == [0, 0]
    return json.loads((out / "compare.json").read_text())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sharded_weights_train_as_replicated_ones_and_as_one_worker(
    optimizer: str, together: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    replicated, sharded = together[f"{optimizer}-replicated"], together[f"{optimizer}-sharded"]
    assert len(alone[optimizer]) == STEPS and alone[optimizer][-1] < alone[optimizer][0]
    assert replicated == pytest.approx(alone[optimizer], rel=CLOSE[optimizer])
    assert sharded == pytest.approx(alone[optimizer], rel=CLOSE[optimizer])
    assert together[f"{optimizer}-sharded-norms"] == pytest.approx(together[f"{optimizer}-replicated-norms"], rel=1e-3)


def test_the_workers_agree(together: dict[str, Any]) -> None:
    assert (together["least"], together["precision"]) == (6, "float32")


def test_experts_are_sharded_too(together: dict[str, Any], alone: dict[str, list[float]]) -> None:
    assert together["experts"] == pytest.approx(alone["experts"], rel=CLOSE["muon"])


def test_packed_samples_train_as_separate_ones(together: dict[str, Any], alone: dict[str, list[float]]) -> None:
    """On two sharded workers, which compute equally many sequences."""
    assert together["packed"] == pytest.approx(alone["packed"], rel=CLOSE["muon"])


@pytest.mark.parametrize("name", ["ar", "ar-beside"])
def test_next_tokens_are_learned_by_two_workers_as_by_one(
    name: str, together: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    """The AR loss alone, whose mean is over the labels of all workers, and beside the block loss."""
    assert together[name] == pytest.approx(alone[name], rel=CLOSE["adamw"])


@pytest.mark.parametrize("trained", ["plan", "adapter-plan"])
def test_each_worker_holds_what_the_plan_says(trained: str, together: dict[str, Any]) -> None:
    weights, held, states, kept = together[trained]
    assert (held, kept) == (weights, states)


def test_sharded_weights_are_gathered_in_bfloat16(together: dict[str, Any]) -> None:
    wide = together["muon-sharded"][:2]
    assert together["bfloat16"] == pytest.approx(wide, rel=0.02)
    assert together["bfloat16"] != wide, "float32 weights give these losses, bit for bit"


def test_a_worker_without_a_roll_out_waits_for_nobody(together: dict[str, Any], alone: dict[str, list[float]]) -> None:
    assert together["half"] == pytest.approx(alone["half"], rel=CLOSE["adamw"])


def test_a_checkpoint_is_whole_as_soon_as_it_is_written(together: dict[str, Any]) -> None:
    assert together["marked"] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("sharding", ["replicated", "sharded"])
def test_held_out_losses_of_two_workers_are_those_of_one(
    sharding: str, together: dict[str, Any], alone: dict[str, Any]
) -> None:
    assert together[f"held-out-{sharding}"] == pytest.approx(alone["held-out"], rel=1e-5)


def test_a_worker_without_a_label_holds_up_nobody(together: dict[str, Any]) -> None:
    assert len(together["without-label"]) == 2 and all(0 < loss < 100 for loss in together["without-label"])


def test_a_checkpoint_of_two_workers_is_continued_by_one(
    out: Path, together: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    for name in ("muon-sharded", "adamw-replicated"):
        folder, optimizer = out / name, name.partition("-")[0]
        assert sorted(path.name for path in folder.iterdir()) == ["step_000003", "step_000006", "step_000008"]
        (folder / "step_000008" / MARKER).unlink()
        again = losses(trained(recipe_on(out / "model", optimizer=optimizer), ALONE, "replicated", str(folder)))
        assert again[:6] == together[name][:6]
        assert again == pytest.approx(alone[optimizer], rel=CLOSE[optimizer])


def test_a_checkpoint_of_one_worker_is_continued_by_two(
    together: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    assert together["from-one"][:3] == alone["muon"][:3]
    assert together["from-one"] == pytest.approx(alone["muon"], rel=CLOSE["muon"])


def test_a_sharded_model_is_written_whole(out: Path, together: dict[str, Any]) -> None:
    read, written = load_model(out / "model", dtype=torch.bfloat16), load_model(out / "written")
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, written.state_dict()[name]), name


def test_an_adapter_over_a_sharded_base_trains_as_one_worker_s(
    out: Path, together: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    """With the base as its teacher, and dropout: each sample's draws are its own."""
    assert alone["adapter"][-1] < alone["adapter"][0]
    assert together["adapter-sharded"] == pytest.approx(alone["adapter"], rel=CLOSE["adamw"])
    assert together["adapter-replicated"] == pytest.approx(alone["adapter"], rel=CLOSE["adamw"])
    expected, base = (load_model(out / name, dtype=torch.bfloat16) for name in ("adapter-alone-model", "dream"))
    for way in ("sharded", "replicated"):
        merged = load_model(out / f"adapter-{way}-model", dtype=torch.bfloat16)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=2**-7, atol=1e-5, msg=name)
            is_adapted = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
            assert torch.equal(tensor, base.state_dict()[name]) != is_adapted, name


def test_a_checkpoint_holds_the_adapter_alone_and_one_worker_goes_on_from_it(
    out: Path, together: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    stored = FileSystemReader(out / "adapter-sharded" / "step_000003").read_metadata().state_dict_metadata
    weights = {name for name in stored if name.startswith("model.")}
    assert weights and all(".lora_" in name for name in weights)
    for step in (6, STEPS):
        (out / "adapter-sharded" / f"step_{step:06d}" / MARKER).unlink()
    again = losses(trained(distilled(out / "dream"), ALONE, "replicated", str(out / "adapter-sharded")))
    assert again[:3] == together["adapter-sharded"][:3]
    assert again == pytest.approx(alone["adapter"], rel=CLOSE["adamw"])


def test_a_checkpoint_that_one_worker_cannot_write_fails_on_both_after_the_same_step(together: dict[str, Any]) -> None:
    """Also where one of them learns of it later: it would wait in its next step for the other."""
    for name, by in (("failing", " by worker 1"), ("failing-marker", "")):
        first, second = together[name]
        assert first == second and f"run/step_000003 cannot be written{by}: " in first
        assert "No space left on device" in first


def test_checkpoints_lie_on_an_object_store(
    out: Path, together: dict[str, Any], alone: dict[str, list[float]], s3: str
) -> None:
    """Two workers wrote them beside their steps, pruned them, and went on from the newest; one goes on from that."""
    assert together["resumed-after"] == 6
    assert together["remote"] == pytest.approx(alone["muon"], rel=CLOSE["muon"])
    system = fsspec.filesystem("s3", use_listings_cache=False)
    assert sorted(path.rpartition("/")[2] for path in system.ls("bucket/pair")) == ["step_000006", "step_000008"]
    assert len(system.ls("bucket/pair/step_000008")) == KEPT
    system.rm(f"bucket/pair/step_000008/{MARKER}")
    again = losses(trained(recipe_on(out / "model", optimizer="muon"), ALONE, "replicated", f"{s3}/pair"))
    assert again[:6] == together["remote"][:6]
    assert again == pytest.approx(alone["muon"], rel=CLOSE["muon"])


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 2], ids=["one worker", "both workers"])
def test_killed_at_a_random_step_a_run_is_the_uninterrupted_one(out: Path, killed: int) -> None:
    if not (out / "undisturbed").exists():
        with pair("slow", out) as workers:
            assert [worker.wait(LIMIT) for worker in workers] == [0, 0]
        (out / "slow").rename(out / "undisturbed")
    expected = (out / "undisturbed" / LOSSES).read_text()
    file, lines = out / "slow" / LOSSES, random.randint(3, 20)
    with pair("slow", out) as workers:
        deadline = time.monotonic() + LIMIT
        while not file.exists() or file.read_text().count("\n") < lines:
            assert time.monotonic() < deadline and workers[0].poll() is None
            time.sleep(0.02)
        for worker in workers[-killed:]:
            worker.send_signal(signal.SIGKILL)
        assert workers[0].wait(LIMIT) != 0, "a worker that lost its neighbour must end"
    with pair("slow", out) as workers:
        assert [worker.wait(LIMIT) for worker in workers] == [0, 0]
    resumed = json.loads((out / "slow.json").read_text())
    assert 2 <= resumed["first"] <= 22, "it must go on from a checkpoint"
    assert file.read_text() == expected
    (out / "slow").rename(out / f"killed-{killed}")
