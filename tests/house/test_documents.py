"""What the documents name is there: files, links, and the options of commands."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import COMMANDS as BENCHMARKS
from jobs.__main__ import COMMANDS as MBD
from jobs.report_sweep import COMMANDS as REPORT_COMMANDS
from mbd_core.checkpoint.chat import chat_prompt, decode_text, question
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import Main, TyperException
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.tokens.load import load_engine
from research.__main__ import COMMANDS as STUDIES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *(path for room in ("benchmarks", "docs", "k8s") for path in sorted((ROOT / room).rglob("*.md"))),
    *sorted(path for path in (ROOT / "research").rglob("*.md") if "published" not in path.parts),
]
ROOTS = "mbd_core|actors|cluster|jobs|benchmarks|research|tests|docs|k8s"
NAMED = re.compile(rf"(?<![\w/.-])((?:{ROOTS})/[\w/.-]*\w)")
MODULE = re.compile(r"(?:from|-m) (mbd_core(?:\.\w+)+)")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.+)", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_modules_and_links_exist(document: Path) -> None:
    text = document.read_text()
    for name in NAMED.findall(text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
    for name in MODULE.findall(text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), f"{document.name} names {name}"
    for link, anchor in LINK.findall(text):
        target = document.parent / link if link else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}#{anchor}"


def anchors(document: Path) -> set[str]:
    """A page's own anchors, and those that a hub gives its headings: small letters, hyphens for spaces."""
    text = document.read_text()
    heads = {re.sub(r"[^\w -]", "", head).replace(" ", "-").lower() for head in HEADING.findall(text)}
    return heads | set(re.findall(r'<a id="([^"]+)">', text))


SOURCES = sorted(
    path
    for room in ROOTS.split("|")
    if room not in ("docs", "tests")
    for path in (ROOT / room).rglob("*")
    if path.suffix in (".py", ".yaml", ".toml", ".json", ".sh") and "shipped" not in path.parts
)
"""Not the shipped models' files: they name the documents of their time, and their bytes stay."""
NAMED_FILE = re.compile(rf"(?<![\w/.-])((?:{ROOTS})/[\w/.-]*\.(?:md|py|yaml|json|svg|png))\b")


def test_the_files_that_sources_name_exist() -> None:
    missing = {
        f"{source.relative_to(ROOT)} names {name}"
        for source in SOURCES
        for name in NAMED_FILE.findall(source.read_text())
        if not (ROOT / name).exists() and not Path(name).stem.isupper()
    }
    assert not missing


ASKED = re.compile(r'"((?:Tom|Mia) has [^"{]*\?)".*?ends in: (#### \d+)', re.DOTALL)


def test_the_questions_of_the_examples_are_answered_as_they_say() -> None:
    """By the shipped model: README.md's two and the serving guide's first."""
    examples = [
        found for name in ("README.md", "docs/guide/serving.md") for found in ASKED.findall((ROOT / name).read_text())
    ]
    assert len(examples) == 3
    loaded = load_engine(model_folder("tiny-mbd"), EngineConfig())
    for asked, end in examples:
        prompt = tuple(chat_prompt(loaded.tokenizer, question(asked)))
        decoding = loaded.decoding({"buffer_size": 4, "tau_m2t": 0.9})
        request = Request(request_id="0", prompt=prompt, max_tokens=64, decoding=decoding)
        (output,) = loaded.engine.generate([request])
        assert decode_text(loaded.tokenizer, output.tokens).endswith(end), asked


ACTIVATE = "source .venv/bin/activate"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_for_a_shell_in_which_the_environment_is_active(document: Path) -> None:
    """As `mbd ...`, `python jobs/x.py` or `ray ...`; README.md and the tutorial say how to activate it."""
    text = document.read_text()
    assert not re.findall(r"\S*(?:\.venv/bin|\bbin/python|\bpython3\b).*", text.replace(ACTIVATE, ""))
    if document in (ROOT / "README.md", ROOT / "docs" / "guide" / "tutorial.md"):
        first = re.search(r"^(?:ray|python|serve|mbd) .*", text, re.MULTILINE)
        assert first is not None and ACTIVATE in text[: first.start()], document.name


def commands() -> dict[str, set[str]]:
    """Every command that a document runs, as a path or as `package name`, and the options it is given there."""
    options: dict[str, set[str]] = {}
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        for job, rest in re.findall(r"python (?:jobs/)?(\w+)\.py((?: [^\n`#|]*)?)", text):
            if (ROOT / "jobs" / f"{job}.py").exists():
                name = rest.split()[0] if job == "report_sweep" and rest.split()[:1] in REPORTS else ""
                options.setdefault(f"jobs/{job}.py {name}".strip(), set()).update(OPTION.findall(rest))
        for name, rest in re.findall(r"(?<![\w/.-])mbd ([a-z]+)((?: [^\n`#|]*)?)", text):
            if name in MBD:
                module = MBD[name][0].replace(".", "/")
                job = "benchmarks" if name == "bench" else f"{module}.py"
                second = rest.split()[0] if rest.split()[:1] in REPORTS or name == "bench" else ""
                options.setdefault(f"{job} {second}".strip(), set()).update(OPTION.findall(rest))
        for command, rest in re.findall(r"python -m ((?:benchmarks|research) [a-z]\w*)((?: [^\n`#|]*)?)", text):
            options.setdefault(command, set()).update(OPTION.findall(rest))
    return options


OPTION = re.compile(r"(?<![\w-])(--[a-z0-9-]+)")
HELP = """
import contextlib, io, json, os, runpy, sys
shown = {}
for job in sys.argv[1:]:
    sys.argv, texts = [*job.split(), "--help"], {}
    run = runpy.run_path if job.split()[0].endswith(".py") else runpy.run_module
    for columns in ("200", "80"):
        os.environ["COLUMNS"] = columns
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            run(sys.argv[0], run_name="__main__")
        texts[columns] = printed.getvalue()
    shown[job] = {**texts, "modules": sorted(sys.modules)}
print(json.dumps(shown))
"""
HEAVY = ("torch", "transformers", "ray", "matplotlib", "pandas", "scipy")
"""Packages that take long to import."""
RUN = 'if __name__ == "__main__":\n    sys.exit(main())'
REPORTS = [[name] for name in REPORT_COMMANDS]
JOBS = [
    *sorted(f"jobs/{path.name}" for path in (ROOT / "jobs").glob("*.py") if RUN in path.read_text()),
    *(f"jobs/report_sweep.py {name}" for name in REPORT_COMMANDS),
    *(f"benchmarks {name}" for name in BENCHMARKS),
    *(f"research {name}" for name in STUDIES),
]


@pytest.fixture(scope="module")
def help_shown() -> dict[str, dict[str, Any]]:
    """What each command prints for `--help` in 200 and in 80 columns, and the modules that are there afterwards.

    In one process, in turn: a module that a command imports is there for those after it too.
    """
    done = subprocess.run(
        [sys.executable, "-c", HELP, *JOBS],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={"PATH": "", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return shown


CALLED = re.compile(
    r"^ *(?:\w+=\S+ |ray job submit [^\n]*? -- )*((?:mbd |python (?:jobs/|-m ))[^\n`|>]*)", re.MULTILINE
)
NOT_TYPED = re.compile(r"\.\.\.|…| \[-|\$")
"""What stands for words that the reader fills in."""
TABLES = {"mbd": MBD, "jobs": MBD, "benchmarks": BENCHMARKS, "research": STUDIES}


def main_of(words: list[str]) -> tuple[Main, list[str]] | None:
    """The command that a line calls, and its arguments; `None` if it is none of this project's."""
    kind, *rest = words if words[0] == "mbd" else words[1:]
    if kind == "-m":
        kind, *rest = rest
    if kind.endswith(".py"):
        module = f"jobs.{Path(kind).stem}"
    elif kind == "mbd_core.multitf.run":
        module = f"{kind}.__main__"
    elif kind in TABLES and rest and rest[0] in TABLES[kind]:
        module = TABLES[kind][rest.pop(0)][0]
    else:
        return None
    if module == "jobs.report_sweep":
        return REPORT_COMMANDS[rest.pop(0) if rest[:1] in REPORTS else "report"], rest
    if module == "benchmarks.__main__":
        return main_of(["mbd", "benchmarks", *rest])
    name, _, entry = module.partition(":")
    return getattr(importlib.import_module(name), entry or "main"), rest


def called_in(document: Path) -> Iterator[list[str]]:
    """The words of each line of a document that calls a command."""
    for line in CALLED.findall(document.read_text().replace("\\\n", " ")):
        if not NOT_TYPED.search(line) and not line.count("'") % 2:
            yield [word for word in shlex.split(re.sub(r"\s#.*", "", line)) if word != "&"]


def test_the_lines_that_documents_call_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they can be read without a file: each argument has its place, each value its kind."""
    monkeypatch.setenv("OTHER_KEY", "a key")
    called = [words for document in DOCUMENTS for words in called_in(document)]
    taken = 0
    for words in called:
        found = main_of(words)
        if found is not None:
            main, arguments = found
            try:
                main.command.make_context(main.called, list(arguments))
            except TyperException as error:
                pytest.fail(f"{shlex.join(words)}: {error.format_message()}")
            taken += 1
    assert taken > 150


@pytest.mark.parametrize("job", JOBS)
def test_help_imports_nothing_that_takes_seconds(job: str, help_shown: dict[str, dict[str, Any]]) -> None:
    earlier = set(help_shown[JOBS[JOBS.index(job) - 1]]["modules"]) if job != JOBS[0] else set()
    new = set(help_shown[job]["modules"]) - earlier
    assert not new & set(HEAVY)


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_option_in_80_columns(job: str, help_shown: dict[str, dict[str, Any]]) -> None:
    options = re.compile(r"(?<![\w-])--[a-z0-9-]+(?![\w…-])")
    panels = [line for line in help_shown[job]["200"].splitlines() if line.startswith("│")]
    names = {option for line in panels for option in options.findall(line)}
    assert "--help" in names and names <= set(options.findall(help_shown[job]["80"]))
    assert "…" not in help_shown[job]["80"]  # nothing else is cut either: lists of names would look alike


@pytest.mark.parametrize("job", sorted(commands()))
def test_the_options_in_documents_are_the_commands(job: str, help_shown: dict[str, dict[str, Any]]) -> None:
    text = help_shown[job]["200"]
    assert "Usage" in text
    for option in commands()[job]:
        assert option in text, f"{job} has no {option}"


# Commands that find a cluster by themselves: on a machine with two of them it may be the other one.
TO_A_CLUSTER = re.compile(
    r"(?:^|[`\s])((?:serve (?:deploy|status|shutdown|config)|"
    r"ray (?:status|job (?:submit|stop|status|logs|list))) [^`\n|]+)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_command_for_a_cluster_names_it(document: Path) -> None:
    """By `--address`; on a page that sets RAY_ADDRESS, `ray job` has it from there. `serve` does not read that."""
    text = document.read_text().replace("\\\n", " ")
    is_set = re.search(r"^export RAY_ADDRESS=", text, re.MULTILINE)
    blocks = re.findall(r"^(?: {4}|```).*?(?:\n```|$)", text, re.MULTILINE | re.DOTALL)
    for written in [*blocks, *re.findall(r"`[^`\n]+`", text)]:
        for command in TO_A_CLUSTER.findall(written):
            assert "--address" in command or (is_set and command.startswith("ray job")), f"{document.name}: {command}"


@pytest.mark.parametrize(("package", "names"), [("benchmarks", BENCHMARKS), ("research", STUDIES)])
def test_a_name_that_is_none_is_refused_with_those_that_are(package: str, names: dict[str, tuple[str, str]]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", package, "nowhere"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (2, f"{package}: there is no nowhere; the names are {', '.join(names)}\n")
    listed = subprocess.run(
        [sys.executable, "-m", package],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert listed.returncode == 0 and all(text in listed.stdout for _, text in names.values())
