"""BFCL's own runner against the endpoint: questions of several turns are asked, its decoder reads the calls, its
functions run, and its checker scores.

The model answers nonsense. So the test asks for a call after each message of the user, and for text after each result.
The package is installed without most of what it needs: its table of models, which imports the clients of a dozen
companies, is replaced by the one model that is asked.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_in_process import running_gateway
from recording_proxy import recording_proxy

from actors.serving.args import ServingArgs
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.evaluation.tasks.kinds.function_calls import VERSION

MODEL = "openbmb/MiniCPM-SALA-FC"  # a name of the package's whose handler asks /v1/chat/completions
PACKAGES = (
    *("tenacity", "overrides", "python-dotenv", "tabulate"),
    *("tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4"),
)
QUESTIONS = {"multi_turn_base": ["multi_turn_base_0"], "simple_java": ["simple_java_0"]}
PROGRAM = f"""
import sys, types

sys.path.append(sys.argv.pop(1))
table = types.ModuleType("bfcl_eval.constants.model_config")
table.MODEL_CONFIG_MAPPING = {{}}
sys.modules[table.__name__] = table
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler


class Handler(OpenAICompletionsHandler):
    def generate_with_backoff(self, **asked):
        last = asked["messages"][-1]
        calls = isinstance(last, dict) and last["role"] == "user"
        asked |= dict(tool_choice="required", max_tokens=256) if calls else dict(tool_choice="none", max_tokens=16)
        return super().generate_with_backoff(**asked)


model = dict(model_name="{MODEL}", display_name="{MODEL}", url="", org="", license="", model_handler=Handler)
model |= dict(input_price=None, output_price=None, is_fc_model=True, underscore_to_dot=True)
table.MODEL_CONFIG_MAPPING["{MODEL}"] = types.SimpleNamespace(**model)
from bfcl_eval.__main__ import cli

cli()
"""


@pytest.mark.slow
def test_questions_of_several_turns_are_asked_and_scored(tmp_path: Path) -> None:
    packages, folder, root = (tmp_path / name for name in ("packages", "model", "root"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    done = subprocess.run([*install, f"bfcl-eval=={VERSION}", *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"bfcl-eval is not installed: {done.stderr.strip().splitlines()[-1]}")
    shutil.copytree(model_folder("tiny-mbd"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65_536}))
    root.mkdir()
    (root / "test_case_ids_to_generate.json").write_text(json.dumps(QUESTIONS))
    (tmp_path / "program.py").write_text(PROGRAM)
    model = {"model": str(folder), "name": MODEL, "engine": {"max_rows": 2, "num_pages": 3_000}}
    args = ServingArgs.read({"device": "cpu", "models": [model]})
    with running_gateway(args) as (url, _), recording_proxy(url) as (proxy, exchanges):
        environment = os.environ | {
            "OPENAI_BASE_URL": f"{proxy}/v1",
            "OPENAI_API_KEY": "none",
            "NO_PROXY": "127.0.0.1",
        }
        environment["BFCL_PROJECT_ROOT"] = str(root)

        def run(*arguments: str) -> None:
            command = [sys.executable, str(tmp_path / "program.py"), str(packages), *arguments, "--model", MODEL]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]

        run("generate", "--run-ids", "--num-threads", "1")
        run("evaluate", "--test-category", ",".join(QUESTIONS), "--partial-eval")
        assert [exchange.refusal for exchange in exchanges if exchange.refusal] == []
    [result] = map(json.loads, next(root.glob("result/**/*multi_turn_base_result.json")).read_text().splitlines())
    assert len(result["result"]) == 4, "a list of answers for each of its turns"
    for first, *others in result["result"]:
        assert len(first) == 1 and all(isinstance(json.loads(arguments), dict) for arguments in first[0].values())
        assert len(others) == 1 and isinstance(others[0], str), "after the call's result comes text"
    for category in QUESTIONS:
        score = json.loads(next(root.glob(f"score/**/*{category}_score.json")).read_text().splitlines()[0])
        assert score["total_count"] == 1
