"""What the documents name is there: files, links, and the options of commands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"(?<![\w/.-])((?:mbd_core|actors|cluster|jobs|tests|docs|k8s)/[\w/.-]*\w)")
MODULE = re.compile(r"(?:from|-m) (mbd_core(?:\.\w+)+)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_modules_and_links_exist(document: Path) -> None:
    text = document.read_text()
    for name in NAMED.findall(text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
    for name in MODULE.findall(text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), f"{document.name} names {name}"
    for link in LINK.findall(text):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"


ACTIVATE = "source .venv/bin/activate"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_are_for_a_shell_in_which_the_environment_is_active(document: Path) -> None:
    """One form: `python jobs/x.py`, `python -m ...`, `ray ...`; README.md and the tutorial say how to activate it."""
    text = document.read_text()
    assert not re.findall(r"\S*(?:\.venv/bin|\bbin/python|\bpython3\b).*", text.replace(ACTIVATE, ""))
    if document.name in ("README.md", "tutorial.md"):
        first = re.search(r"^(?:ray|python|serve) .*", text, re.MULTILINE)
        assert first is not None and ACTIVATE in text[: first.start()], document.name


def commands() -> dict[str, set[str]]:
    """Every job that a document runs, and the options it is given there."""
    options: dict[str, set[str]] = {}
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        for job, rest in re.findall(r"python (?:jobs/)?(\w+)\.py((?: [^\n`#|]*)?)", text):
            if (ROOT / "jobs" / f"{job}.py").exists():
                options.setdefault(job, set()).update(re.findall(r"(?<![\w-])(--[a-z0-9-]+)", rest))
    return options


HELP = """
import contextlib, io, json, runpy, sys
texts = {}
for job in sys.argv[1:]:
    sys.argv, printed = [job, "--help"], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(job, run_name="__main__")
    texts[job] = printed.getvalue()
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """What each command prints for `--help`; one process for all, for most of their time is the import of PyTorch."""
    jobs = [str(ROOT / "jobs" / f"{job}.py") for job in sorted(commands())]
    done = subprocess.run(
        [sys.executable, "-c", HELP, *jobs], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={"COLUMNS": "200", "PATH": "", "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {Path(job).stem: text for job, text in json.loads(done.stdout).items()}


@pytest.mark.parametrize("job", sorted(commands()))
def test_the_options_in_documents_are_the_commands(job: str, help_texts: dict[str, str]) -> None:
    assert "Usage" in help_texts[job]
    for option in commands()[job]:
        assert option in help_texts[job], f"{job}.py has no {option}"


# Commands that find a cluster by themselves: on a machine with two of them it may be the other one.
TO_A_CLUSTER = re.compile(
    r"(?:^|[`\s])((?:serve (?:deploy|status|shutdown|config)|"
    r"ray (?:status|job (?:submit|stop|status|logs|list))) [^`\n|]+)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_a_command_for_a_cluster_names_it(document: Path) -> None:
    """By `--address`; on a page that sets RAY_ADDRESS, `ray job` has it from there. `serve` does not read that."""
    text = document.read_text().replace("\\\n", " ")
    is_set = re.search(r"^export RAY_ADDRESS=", text, re.MULTILINE)
    blocks = re.findall(r"^(?: {4}|```).*?(?:\n```|$)", text, re.MULTILINE | re.DOTALL)
    for written in [*blocks, *re.findall(r"`[^`\n]+`", text)]:
        for command in TO_A_CLUSTER.findall(written):
            assert "--address" in command or (is_set and command.startswith("ray job")), f"{document.name}: {command}"
