"""Training from a served endpoint: its answers carry all that a learner replays, its replicas take the new weights."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import openai
import pytest
import torch
from gateway_in_process import running_gateway

from actors.serving.args import ServingArgs
from mbd_core.checkpoint.base_files import read_base
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.mlp import Router
from mbd_core.models.model_config import MoEConfig
from mbd_core.multitf.states.answer import read_answer
from mbd_core.multitf.step.learner import Learner
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.groups import GroupConfig, RewardedAnswer, advantages
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
                    scored.append(RewardedAnswer(group=number, correct=False, tpf=tpf, rewards={"tpf": tpf}))
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


EXPERTS = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=16, score="softmax", norm_topk_prob=True)


def test_the_experts_that_an_endpoint_records_are_the_engines(tiny_model_dir: Path, tmp_path: Path) -> None:
    """OpenAI's client gets them with its choices; a learner whose routers have moved is given them."""
    dense = read_folder(tiny_model_dir)
    model = Decoder(replace(dense.config, architecture="SDARMoeForCausalLM", moe=EXPERTS))
    init_weights(model, seed=0, std=0.2)
    save_model(folder := tmp_path / "experts", model, tokenizer=dense.tokenizer, dtype=torch.float32)
    engine = EngineConfig(max_rows=4, num_pages=100)
    served = [{"model": str(f), "name": f.name, "engine": {"max_rows": 4}} for f in (folder, tiny_model_dir)]
    fields = {"return_token_ids": True, "return_step_map": True, "return_routed_experts": True, "decoding": ASKED}
    asked = {"model": "experts", "prompt": PROMPTS[0], "n": 4, "max_tokens": 24, "temperature": 1, "seed": 7}
    with running_gateway(ServingArgs.read({"device": "cpu", "models": served})) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        reply = client.completions.create(**asked, extra_body=fields, timeout=SECONDS).model_dump()
        for other, changes, named, why in (
            ({"model": tiny_model_dir.name}, {}, "return_routed_experts", "SDARForCausalLM here has no experts"),
            ({}, {"return_step_map": False}, "return_routed_experts", "only allowed when return_step_map is true"),
            ({"stream": True}, {}, "stream", "records whole answers"),
            ({"stop": "x"}, {}, "stop", "records whole answers"),
        ):
            with pytest.raises(openai.BadRequestError, match=why) as refused:
                client.completions.create(**asked | other, extra_body=fields | changes, timeout=SECONDS)
            assert refused.value.param == named
    decoding = DecodingConfig(block_size=4, **ASKED)
    settings = {"decoding": decoding, "max_tokens": 24, "advantage": 1.0, "correct": False}
    answers = [read_answer(choice, **settings) for choice in reply["choices"]]
    requests = [
        Request(
            request_id=f"0-{number}",
            prompt=answer.prompt,
            max_tokens=24,
            decoding=decoding,
            rollout=True,
            experts=True,
            sampling=Sampling(temperature=1, seed=7 + number),
        )
        for number, answer in enumerate(answers)
    ]
    for answer, output in zip(answers, Engine(load_model(folder), engine).generate(requests), strict=True):
        assert output.piece.steps is not None
        own, recorded = ([r.columns() for r in each.experts] for each in (output, answer))
        assert (answer.tokens, recorded) == (output.tokens, own) and own
    moved = load_model(folder, dtype=torch.float32)
    for number, router in enumerate(module for module in moved.modules() if isinstance(module, Router)):
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(number))
    routed, free = (
        Learner(moved, replace(ADAMW, lr=0.0, batch_size=4), PolicyObjective()).update(
            [replace(answer, experts=records) for answer, records in pairs]
        )
        for pairs in ([(a, a.experts) for a in answers], [(a, ()) for a in answers])
    )
    assert routed.d_mean < free.d_mean / 2
    with pytest.raises(ValueError, match="experts"):
        Learner(load_model(tiny_model_dir, dtype=torch.float32), ADAMW, PolicyObjective()).update(answers)
    record = reply["choices"][0]["rollout"]["experts"][0]
    for mistake in ({"ids": "x"}, {"shape": [0, 0, 0]}, {"shape": [1, 2, 3]}, {"ids": None}):
        broken = reply["choices"][0] | {"rollout": reply["choices"][0]["rollout"] | {"experts": [record | mistake]}}
        with pytest.raises(ValueError):
            read_answer(broken, **settings)


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
