"""Reinforcement learning on Ray is the run without it, bit for bit; processes that are killed change nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError
from rl_runs import ENGINE, finish, rollout_rows, timeless_lines, tiny_run
from safetensors.torch import load
from torch import Tensor

from actors.rl.executor import EngineActor, Layout, RayRLExecutor, WeightsOrder
from mbd_core.checkpoint.loading import load_model
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.executor import LearnerLost
from mbd_core.rl.folder import RunFolder
from mbd_core.rl.loop import RLRun
from mbd_core.rl.parts import RewardFailed
from mbd_core.rl.rewards import RewardConfig
from mbd_core.rl.rollouts import RolloutPlan
from mbd_core.storage.folder import Folder

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0
OFF_POLICY = PolicyObjective(kind="clipped", old="rollout")


def finish_on_ray(
    recipe: RLRecipe, folder: Path, *, engines: int = 1, learners: int = 1, share: bool = False, failures: int = 0
) -> dict[str, Tensor]:
    plan = RolloutPlan.of(recipe, ENGINE)
    layout = Layout.of(recipe, engines=engines, learners=learners, tensor_parallel=1, device="cpu", shares=share)
    claim = RunFolder(Folder.at(folder), recipe, resume=False)
    with claim as claimed, RayRLExecutor(recipe, plan.engine, layout) as executor:
        model = RLRun(plan, claimed, executor).run(max_failures=failures)
        return load(model.read_bytes("model.safetensors") or b"")


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_on_ray_is_the_run_without_it(ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Two engines and one learner, which share nothing; weights go through the object store."""
    recipe = tiny_run(tiny_model_dir, iterations=2)
    _, wanted = finish(recipe, tmp_path / "plain")
    assert same(finish_on_ray(recipe, tmp_path / "ray", engines=2), wanted)
    assert rollout_rows(tmp_path / "ray") == rollout_rows(tmp_path / "plain")
    broken = replace(recipe, rewards=RewardConfig(rewards={"rl_rewards:broken": 1.0}, on_reward_error="stop"))
    with pytest.raises(
        RewardFailed, match=r"^reward 'rl_rewards:broken' raised KeyError: .* for an answer to gsm-mini"
    ):
        finish_on_ray(broken, tmp_path / "broken")
    with pytest.raises(
        RewardFailed, match=r"^no answer of iteration 1 got a reward, 8 of 8 failed: reward 'rl_rewards:b"
    ):
        finish_on_ray(replace(broken, rewards=replace(broken.rewards, on_reward_error="drop")), tmp_path / "dropped")
    with pytest.raises(ValueError, match=r"--share .* needs the schedule sync"):
        Layout.of(
            replace(recipe, schedule="one-step-off", objective=OFF_POLICY),
            engines=1,
            learners=1,
            tensor_parallel=1,
            device="cpu",
            shares=True,
        )


def test_an_engine_never_keeps_other_weights_of_the_same_number(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that was lost after the swap to version 1, and goes on from an older state, has another version 1."""
    stored: dict[ray.ObjectRef, dict[str, Tensor]] = {}
    monkeypatch.setattr(ray, "get", stored.__getitem__)
    own = dict(load_model(tiny_model_dir).state_dict())
    plan = RolloutPlan.of(tiny_run(tiny_model_dir), ENGINE)
    number, asked = plan.parts(0)[0]
    actor, drawn = EngineActor(str(tiny_model_dir), plan.engine), []
    for weights in (own, {name: 0.5 * tensor for name, tensor in own.items()}, own):
        reference = ray.ObjectRef.from_random()
        stored[reference] = weights
        order = WeightsOrder(1, (reference,))
        answers = [actor.decode(number, asked, order)[1] for _ in range(2)]
        assert answers[0]["tokens"] == answers[1]["tokens"]
        drawn.append(answers[0]["logprobs"])
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_lost_learner_is_known_by_its_peer_s_failure_or_by_its_lost_weights(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says later than the process group that a machine is lost."""

    class Process:
        """An actor in the place of a learner's worker or an engine."""

        def end(self) -> None:
            time.sleep(1)
            os._exit(1)

        def idle(self) -> None:
            time.sleep(30)

        def fail(self) -> None:
            raise RuntimeError("Connection closed by peer")

        def decode(self, number: int, table: object, weights: object) -> None:
            raise ObjectLostError("00" * 28, b"", "")

    executor, actor = RayRLExecutor.__new__(RayRLExecutor), ray.remote(num_cpus=0)(Process)
    executor._learners = [actor.remote() for _ in range(3)]
    lost, failed, whole = executor._learners
    with pytest.raises(LearnerLost, match="a learner's process was lost: ") as raised:
        executor._finish([lost.end.remote(), failed.fail.remote(), whole.idle.remote()])
    assert isinstance(raised.value.__cause__, RayActorError) and not executor._learners

    monkeypatch.setattr("actors.rl.executor.LOST_SECONDS", 1.0)
    failed, whole = (actor.remote() for _ in range(2))
    with pytest.raises(RuntimeError, match="Connection closed by peer") as raised:
        executor._finish([failed.fail.remote(), whole.idle.remote()])
    assert not isinstance(raised.value, LearnerLost), "no process was lost"

    executor._learners, executor._engines = [whole], [actor.remote()]
    executor._order = WeightsOrder(1, (None,))
    with pytest.raises(LearnerLost, match="its weights with it"):
        list(executor.rollouts([(0, None)]))  # type: ignore[list-item]
    assert not executor._learners


@pytest.mark.slow
@pytest.mark.parametrize("form", ["two learners", "shared devices", "one step off"])
def test_other_forms_of_a_run_end(ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, form: str) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=3)
    if form == "one step off":
        recipe = replace(recipe, schedule="one-step-off", objective=OFF_POLICY)
    _, wanted = finish(recipe, tmp_path / "plain")
    learners = 1 if form == "one step off" else 2
    found = finish_on_ray(recipe, tmp_path / "ray", engines=2, learners=learners, share=form == "shared devices")
    if learners == 1:
        assert same(found, wanted)
        assert rollout_rows(tmp_path / "ray") == rollout_rows(tmp_path / "plain")
    else:  # sums in another order
        assert all(torch.allclose(found[n].float(), wanted[n].float(), atol=2e-2) for n in wanted)
        differences = [(found[n].float() - wanted[n].float()).abs().flatten() for n in wanted]
        assert float(torch.cat(differences).mean()) < 1e-4, "the last update alone moves a weight by 5e-3"
        assert (
            rollout_rows(tmp_path / "ray")["00000/part-000.parquet"]
            == (rollout_rows(tmp_path / "plain")["00000/part-000.parquet"])
        )


def kill_soon(names: str, *, when: Callable[[], bool]) -> list[int]:
    """Kill one process of that name once, as soon as `when`; its pid stands in the list then."""
    killed: list[int] = []

    def watch() -> None:
        end = time.monotonic() + PATIENCE
        while not killed and time.monotonic() < end:
            if when():
                for process in psutil.Process(os.getpid()).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        if not killed and any(names in part for part in process.cmdline()):
                            process.kill()
                            killed.append(process.pid)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["EngineActor", "LearnerActor"])
def test_an_actor_that_is_killed_changes_nothing(
    ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, actor: str
) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=4)
    _, wanted = finish(recipe, tmp_path / "plain")
    numbers = tmp_path / "ray" / "iterations.jsonl"
    killed = kill_soon(f"ray::{actor}", when=numbers.exists)  # in the second iteration
    found = finish_on_ray(recipe, tmp_path / "ray", failures=2)
    assert killed
    assert same(found, wanted)
    assert rollout_rows(tmp_path / "ray") == rollout_rows(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "s3"])
def test_a_driver_that_is_killed_goes_on(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path, place: str
) -> None:
    """The command itself, with a cluster of its own, which ends with it."""
    runs = Folder.at(tmp_path if place == "disk" else f"{request.getfixturevalue('s3')}/{tmp_path.name}")
    changes = {"decoding": {"buffer_size": 3, "tau_m2t": 0.05}, "rewards": {"correct": 0, "tpf": 1}}
    command = [
        *(sys.executable, str(ROOT / "jobs" / "train_rl.py"), "--recipe", "tiny-rl", "--model", str(tiny_model_dir)),
        *("--task", "gsm-mini", "--prompts", "2", "--group", "4", "--max-tokens", "8", "--iterations", "4"),
        *("--decoding", json.dumps(changes["decoding"]), "--rewards", json.dumps(changes["rewards"])),
        *("--advantages", "joint", "--least-right", "0", "--least-tpf-range", "0", "--part-rows", "4"),
        *("--max-rows", "4", "--num-pages", "100", "--storage", str(runs), "--log-to", "none"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    whole = subprocess.run(
        [*command, "--run-name", "whole", "--local"], env=environment, capture_output=True, text=True
    )
    assert whole.returncode == 0, whole.stderr
    first = subprocess.Popen(
        [*command, "--run-name", "killed"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + PATIENCE
    while not (runs / "killed").has("iterations.jsonl") and time.monotonic() < end:
        assert first.poll() is None, "it ended by itself"
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = subprocess.run(
        [*command, "--run-name", "killed", "--resume"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    models = [load((runs / name / "model").read_bytes("model.safetensors") or b"") for name in ("whole", "killed")]
    assert same(*models)
    assert rollout_rows(runs / "killed") == rollout_rows(runs / "whole")
    assert timeless_lines(runs / "killed") == timeless_lines(runs / "whole")
