"""The command `mbd`: each sub-command is the job, completion is fast, the doctor plans what is built."""

import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jobs import doctor
from jobs.__main__ import COMMANDS, main
from mbd_core.checkpoint.loading import load_model, planned_bytes
from mbd_core.checkpoint.saving import save_random
from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.num_pages import bytes_per_page
from mbd_core.models.quantize import weight_bytes
from mbd_core.models.shapes import SHAPES
from mbd_core.serving.tokens.load import load_engine

ROOT = Path(__file__).resolve().parents[2]
RUN, MBD = 'if __name__ == "__main__":\n    sys.exit(main())', "jobs.__main__"
HEAVY = {"torch", "transformers", "ray", "matplotlib", "pandas", "scipy"}
COMPLETE = """
import contextlib, io, json, sys
from jobs.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    main([])
print(json.dumps({"printed": printed.getvalue(), "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""


@pytest.mark.parametrize("name", [name for name, (module, _) in COMMANDS.items() if module.startswith("jobs.")])
def test_a_sub_command_has_the_help_of_its_job(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = import_module(COMMANDS[name][0]).main
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert job(["--help"]) == 0
    own = capsys.readouterr().out
    assert f"Usage: mbd {name}" in shown and "Usage: python jobs/" in own
    assert shown.split()[shown.split().index("[OPTIONS]") :] == own.split()[own.split().index("[OPTIONS]") :]


def test_every_job_is_a_sub_command() -> None:
    jobs = {f"jobs.{path.stem}" for path in (ROOT / "jobs").glob("*.py") if RUN in path.read_text()} - {MBD}
    assert jobs == {module for module, _ in COMMANDS.values() if module.startswith("jobs.")}


def complete(words: str, shell: str = "bash", instruction: str = "complete") -> dict[str, Any]:
    """What the shell is offered behind these words, and the packages that were imported for it."""
    variables = {"_MBD_COMPLETE": f"{instruction}_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def test_completion_offers_names_and_options_and_imports_nothing_that_takes_seconds() -> None:
    names, options, nested = complete("mbd "), complete("mbd serve --max-"), complete("mbd bench eng")
    assert {*names["printed"].split()} == {*COMMANDS}
    assert {*options["printed"].split()} == {
        "--max-rows",
        "--max-prefill-tokens",
        "--max-waiting",
        "--max-model-len",
        "--max-step-seconds",
    }
    assert nested["printed"].split() == ["engine"]
    assert not HEAVY & {*names["modules"], *options["modules"]}
    assert "_MBD_COMPLETE" in complete("mbd", instruction="source")["printed"]


def test_the_list_of_commands_takes_less_than_a_second_of_cpu() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "jobs", "--help"], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_an_unknown_name_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in line and all(name in line for name in COMMANDS)
    assert main(["serve", "--port", "0"]) == 2 and capsys.readouterr().err.startswith("serve: ")


def test_a_character_that_the_terminal_lacks_is_printed_as_its_escape() -> None:
    code = (
        "import sys\n"
        "from mbd_core.command_line import command\n"
        "def run() -> None:\n    print('84 \\u00b1 3 %')\n"
        "sys.exit(command(run)([]))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "84 \\xb1 3 %\n", "")


@pytest.mark.parametrize(
    ("number", "go_on", "said"),
    [
        (signal.SIGINT, None, ""),
        (signal.SIGINT, "the same command goes on", "work: stopped; the same command goes on\n"),
        (signal.SIGTERM, None, ""),
        (signal.SIGHUP, None, ""),
    ],
)
def test_a_signal_ends_a_command_that_cleans_up_and_says_how_to_go_on(
    number: signal.Signals, go_on: str | None, said: str, tmp_path: Path
) -> None:
    code = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "from mbd_core.command_line import command\n"
        "from mbd_core.files import folder_beside\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it\n"
        "def run() -> None:\n"
        "    with folder_beside(Path(sys.argv[1]), 'model'):\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(60)\n"
        f"sys.exit(command(run, 'mbd work', go_on={go_on!r})([]))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "model")]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        child.send_signal(number)
        assert child.communicate(timeout=60) == ("", said) and child.returncode == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["prepare", "", "--model", "tiny-mbd", "--out", "o"], "FILE|DIR|URL..."),
        (["prepare", "a", "--model", "", "--out", "o"], "--model"),
        (["convert", "", "--out", "o"], "[DIR]"),
        (["report", "tables", ""], "DIR..."),
        (["train", "--base", ""], "--base"),
        (["train", "--config", ""], "--config"),
        (["train", "--set", "train.lora.start="], "--set train.lora.start"),
        (["serve", "--model", ""], "--model"),
    ],
)
def test_an_empty_name_is_not_the_folder_of_the_shell(
    line: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    sentence = f"{what}: an empty name is no folder, file or model; give a name or a path\n"
    assert capsys.readouterr().err.endswith(sentence) and not any(tmp_path.iterdir())


def diagnosis(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_doctor_plans_the_engine_that_is_built(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, config = tmp_path / "mixture", SHAPES["tiny-llada2"]
    save_random(config, folder, tokenizer=shape_tokenizer(config))
    code, said = diagnosis(capsys, "--model", str(folder), "--max-rows", "3", "--kv-memory-fraction", "0.5")
    assert (code, said["serves"], said["obstacles"]) == (0, True, [])
    with load_engine(folder, EngineConfig(max_rows=3, kv_memory_fraction=0.5)) as loaded:
        engine, kernels = loaded.engine, [row for row in said["kernels"] if row["of"] == "attention"]
        weights = engine.model.model.norm.weight
        memory = said["KV memory"]
        assert memory["pages"] == engine.num_pages and memory["a page's tokens"] == engine.page_size
        assert memory["a page's bytes"] == bytes_per_page(engine.model.config, engine.page_size, weights.dtype)
        (chosen,) = (row["bytes, each rank's"] for row in said["weights"] if row["chosen"])
        assert chosen == weight_bytes(engine.model)
        assert [row["kernel"] for row in kernels if row["chosen"]] == [engine.attention.name]
        assert {row["kernel"]: row["why not"] for row in kernels if not row["chosen"]} == engine.attention.reasons
        assert said["model"]["family"] == config.architecture and said["model"]["experts"] == config.moe.num_experts


@pytest.mark.parametrize("parts", [None, "all"])
def test_weights_are_planned_to_the_byte(parts: Any) -> None:
    folder = model_folder("tiny-mbd")
    model = load_model(folder, fp8=parts)
    planned = planned_bytes(model.config, model.model.norm.weight.dtype, fp8=parts)
    assert planned == weight_bytes(model)


def test_two_ranks_share_the_weights_and_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    _, alone = diagnosis(capsys)
    _, shared = diagnosis(capsys, "--tensor-parallel", "2")
    whole, part = (next(row["bytes, each rank's"] for row in s["weights"]) for s in (alone, shared))
    assert whole / 2 < part < whole
    assert shared["KV memory"]["a token's bytes"] * 2 == alone["KV memory"]["a token's bytes"]


def test_the_doctor_says_why_a_model_cannot_be_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, said = diagnosis(capsys, "--kv-memory-fraction", "0.0000000001")
    assert code == 1 and "kv_memory_fraction" in said["obstacles"][0] and not said["serves"]
    code, said = diagnosis(capsys, "--num-pages", "99999999999")
    assert code == 1 and "num_pages=99999999999 take" in said["obstacles"][0]
    config = replace(SHAPES["tiny-sdar"], block_size=4096, max_positions=8192)
    save_random(config, tmp_path / "long", tokenizer=shape_tokenizer(config))
    code, said = diagnosis(capsys, "--model", str(tmp_path / "long"))
    assert (code, said["obstacles"]) == (1, ["max_prefill_tokens=2048 is less than a block (4096)"])
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert main(["doctor"]) == 1
    assert "http://127.0.0.1:8265" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("mbd_core.ops.machine.free_host_memory", lambda: 1000)
    assert "1,000 are free" in diagnosis(capsys)[1]["obstacles"][0]
    for wrong in (str(tmp_path), "nowhere"):
        assert main(["doctor", "--model", wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert wrong in line


def test_the_extras_of_the_package_are_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*doctor.SWITCHES_ON} == {*extras} - {"dev"}
