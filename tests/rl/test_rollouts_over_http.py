"""Training from a served endpoint: its answers carry all that a learner replays, its replicas take the new weights."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import torch
from gateway_in_process import running_gateway

from actors.serving.args import ServingArgs
from mbd_core.checkpoint.folder import read_base
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.multitf.states.answer import read_answer
from mbd_core.multitf.step.learner import Learner
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.groups import GroupConfig, ScoredAnswer, advantages
from mbd_core.rl.recipes import ADAMW

KEY, ASKED, SECONDS = "ann-0123456789abcdef", {"buffer_size": 3, "tau_m2t": 0.05}, 300
PROMPTS = ("Tom has 3 apples.", "Mia has 7 pens. Mia sells 2 pens.")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rl.md"
EVERY = GroupConfig(advantages="joint", least_right=0.0, least_tpf_range=0.0)


def post(url: str, route: str, **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(url + route, json={"model": "tiny", **body}, headers=headers, timeout=SECONDS)
    assert reply.status_code == 200, reply.text
    answered: dict[str, Any] = reply.json()
    return answered


def test_a_learner_trains_from_the_endpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Five iterations over HTTP alone: drawn answers, one update on them, a model folder, and the order to take it.

    What the learner scores is what the engine scored, also with its own weights of the iteration before; the reply
    says which weights decoded, and tokens per forward rise, which they are rewarded for.
    """
    keys = tmp_path / "keys"
    keys.write_text(f"ann {KEY} administrator\n")
    model = {"model": str(tiny_model_dir), "name": "tiny", "engine": {"max_rows": 8, "num_pages": 200}}
    args = ServingArgs.read({"device": "cpu", "models": [model], "api_keys": str(keys)})
    config = replace(ADAMW, steps=5, batch_size=16, lr=1e-2, warmup=0)
    learner = Learner(load_model(tiny_model_dir, dtype=torch.float32), config, PolicyObjective())
    base, speeds = read_base(tiny_model_dir), []
    decoding = DecodingConfig(block_size=4, **ASKED)
    with running_gateway(args) as (url, _):
        for iteration in range(5):
            choices, scored = [], []
            for number, prompt in enumerate(PROMPTS):
                asked = {"prompt": prompt, "n": 8, "max_tokens": 8, "temperature": 1, "seed": 100 * iteration + number}
                wanted = {"return_token_ids": True, "return_step_map": True, "decoding": ASKED}
                reply = post(url, "/v1/completions", **asked, **wanted)
                assert (reply["mbd"]["oldest_weights"], reply["mbd"]["newest_weights"]) == (iteration, iteration)
                for choice in reply["choices"]:
                    steps = choice["rollout"]["step_map"] + choice["rollout"]["terminal"]["step_map"]
                    tpf = len(choice["token_ids"]) / max(steps)
                    choices.append(choice)
                    scored.append(ScoredAnswer(group=number, correct=False, tpf=tpf, rewards={"tpf": tpf}))
            taught, dropped = advantages(scored, {"tpf": 1.0}, EVERY, seed=0)
            assert len(taught) == 16 and not dropped
            report = learner.update(
                [
                    read_answer(
                        choices[place], decoding=decoding, max_tokens=8, advantage=taught[place], correct=False
                    )
                    for place in taught
                ]
            )
            assert report.d_max < 2e-4 and report.effective_share > 0.999
            speeds.append(fmean(answer.tpf for answer in scored))
            decoder = load_model(tiny_model_dir, dtype=torch.float32)
            decoder.load_state_dict(learner.weights())
            folder = tmp_path / f"weights-{iteration}"
            save_model(folder, decoder, base=base, generation=dict(base.generation))
            order = post(url, "/update_weights", folder=str(folder), mode="wait", version=iteration + 1)
            assert order["version"] == iteration + 1
    assert speeds[-1] > 1.3 * speeds[0]


def test_the_contracts_example_runs_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's two pieces of Python, one after the other: engine and learner in a process, then an endpoint's
    answers. They are the same, some are right and some wrong, and the learner scores them as the engine did."""
    alone, served = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(alone, names)
    assert names["report"].d_max < 2e-4 and names["report"].tokens < names["report"].trace_rl_tokens / 2
    assert 0 < sum(names["correct"]) < 8 and names["loaded"].engine.weights_version == 1
    args = ServingArgs.read({"device": "cpu", "models": [{"model": "ledger-mbd", "engine": {"num_pages": 400}}]})
    with running_gateway(args) as (url, _):
        exec(served.replace("http://localhost:8000", url), names)
    same, d_max = capsys.readouterr().out.split()[-2:]
    assert same == "True" and float(d_max) < 2e-4
