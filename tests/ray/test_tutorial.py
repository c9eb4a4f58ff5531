"""docs/guide/tutorial.md as a reader types it: every block in its order, in one shell, in a fresh copy of the project.

And the same commands with a model of every family, as the page's last section says, on a cluster.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from session_processes import living_with

from cluster.local import free_ports, local_cluster
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_random
from mbd_core.checkpoint.shape_tokenizer import LEARNED, shape_tokenizer
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.log import PLOT
from mbd_core.tasks import ledger_mini

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text for language, text in BLOCKS if language == "bash"]
PRINTED = [text for language, text in BLOCKS if language == "text"]
SECONDS = 900.0
FIGURE = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")
FAMILIES = {
    "sdar": ("SDAR-8B-b32", "single,multi"),
    "llada2": ("LLaDA2-Mini", "single,multi"),
    "llada": ("D2F-LLaDA", "d2f"),
    "dream": ("D2F-Dream", "d2f"),
}
"""Of each family the recipe, and methods that both the random model and the trained one decode with."""


def test_the_blocks_are_commands_that_bash_reads() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "text"}
    done = subprocess.run(["bash", "-n"], input="\n".join(COMMANDS), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_environment_is_active_before_the_first_command_needs_it() -> None:
    """And what is started in the background is ended by name."""
    lines = "\n".join(COMMANDS).replace("\\\n", " ").splitlines()
    active = lines.index(next(line for line in lines if line.startswith("source .venv/bin/activate")))
    assert [line.split()[0] for line in lines[:active]] == ["make"]
    assert not any(re.match(r"(python|ray|serve)\b", line) for line in lines[:active])
    started = [line for line in lines if line.rstrip().endswith("&")]
    assert len(started) == 1 and lines[lines.index(started[0]) + 1] == "SERVER=$!"
    assert lines[-2:] == ['kill "$SERVER"', 'wait "$SERVER"']


def test_the_question_is_of_the_test_split_and_its_answer_is_the_right_one() -> None:
    asked = " ".join(re.findall(r'QUESTION="(?:\$QUESTION )?([^"]*)"', "\n".join(COMMANDS)))
    problems = itertools.islice(ledger_mini.generate(split="test", seed=0), 100)
    (problem,) = (problem for problem in problems if problem["question"] == asked)
    assert problem["answer"].splitlines()[-1] == PRINTED[-1].strip()


def fresh_copy(folder: Path) -> Path:
    """The project's files, and a `.venv` with the packages of the one that runs here, which `make` finds complete."""
    copy = folder / "mbd-cluster"
    made = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=made)
    (copy / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (copy / ".venv" / path.name).symlink_to(path)
    (copy / ".venv" / ".installed").unlink(missing_ok=True)
    (copy / ".venv" / ".installed").touch()
    return copy


def shape(line: str) -> str:
    """A line with its figures left out."""
    return FIGURE.sub("0", line).strip()


@pytest.mark.slow
def test_the_page_typed_into_one_shell_gives_what_it_says(tmp_path: Path) -> None:
    typed = "\n".join(COMMANDS)
    (port,) = free_ports(1)
    assert typed.count("PORT=8000 ") == 1
    script = typed.replace("PORT=8000 ", f"PORT={port} ")  # the page lets a reader choose it
    home, copy = tmp_path / "home", fresh_copy(tmp_path)
    home.mkdir()
    own = Path(sys.prefix, "bin")
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p).resolve() != own.resolve())
    # The packages' folder knows the project by the path of its own checkout: here the copy is meant.
    environment = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(copy), "LANG": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    folder = home / "mbd-tutorial"
    log = folder / "serve.log"
    assert done.returncode == 0, done.stdout[-8000:] + (log.read_text() if log.exists() else "")
    assert not living_with(str(tmp_path))

    printed = iter([shape(line) for line in done.stdout.replace("\\n", "\n").splitlines()])
    for line in "".join(PRINTED).splitlines():
        wanted = shape(line)
        assert any(wanted in found for found in printed), f"not printed, or not there: {line}\n{done.stdout[-8000:]}"

    rows = json.loads((folder / "sweep" / "report.json").read_text())["rows"]
    accuracy = {(row["model"], row["method"]): row["accuracy"] for row in rows}
    assert set(accuracy) == {
        (model, method) for model in ("ledger-bd", "first") for method in ("SingleBD", "multi-bd")
    }
    assert all(10 < value < 100 for value in accuracy.values())
    assert accuracy["first", "multi-bd"] > accuracy["ledger-bd", "multi-bd"] + 5
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["choices"][0]["message"]["content"].splitlines()[-1] == PRINTED[-1].strip()
    assert "Traceback" not in done.stdout, done.stdout


def random_base(family: str, folder: Path) -> Path:
    """A tiny model with random weights in the family's real layout, and a tokenizer with a chat template."""
    words = {"vocab_size": LEARNED, "mask_token_id": LEARNED - 2, "eos_token_ids": (LEARNED - 1,)}
    config = replace(SHAPES[f"tiny-{family}"], **words)
    save_random(config, folder, tokenizer=shape_tokenizer(config), dtype=torch.float32)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_commands_take_a_model_of_every_family(family: str, tmp_path: Path) -> None:
    recipe, methods = FAMILIES[family]
    base = random_base(family, tmp_path / f"base-{family}")
    script = "\n".join(COMMANDS[1:])  # without the installation
    for text, own in {
        "--model ledger-bd": f"--model {base}",
        "--recipe ledger-mbd": f"--recipe {recipe} --base {base}",
        '"ledger-bd,': f'"{base},',
        "import ledger_mini": "import gsm_mini as ledger_mini",
        ", 1000)": ", 200)",
        "--max-length 320": "--max-length 256",
        "--steps 100": "--steps 2",
        "--tasks ledger-mini": "--tasks gsm-mini",
        "--methods single,multi-bd": f"--methods {methods}",
        "--limit 100": "--limit 4 --max-tokens 32",
        '"messages"': '"max_tokens": 32, "messages"',
    }.items():
        assert text in script, text
        script = script.replace(text, own)
    (port,) = free_ports(1)
    folder = tmp_path / "w"
    folder.mkdir()
    with local_cluster() as cluster:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, **cluster.environment, "W": str(folder), "PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "200 rows: 200 kept, 0 too long" in done.stdout
    run = folder / "runs" / "first"
    points = [json.loads(line) for line in (run / LOSSES).read_text().splitlines()]
    assert [point["step"] for point in points] == [0, 1] and all(point["loss"] > 0 for point in points)
    assert (run / PLOT).exists() and list((run / "tensorboard").iterdir())
    assert load_model(folder / "first").config.architecture == SHAPES[f"tiny-{family}"].architecture
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["model"] == "first" and answer["usage"]["completion_tokens"] > 0
    rows = json.loads((folder / "sweep" / "report.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {f"base-{family}", "first"}
