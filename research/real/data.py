"""The study's conversations: gsm-mini, fields of Debian packages as JSON, docstrings in the third person, and GSM8K.

`python -m research real --out out/real/data` writes `train.jsonl` (conversations of all tasks, shuffled) and a
file of unseen problems for each task. A hash of a problem's key decides its split (`mbd_core/tasks/split.py`), so no
test problem is trained. The packages come from the machine's package lists, the docstrings from its Python: the values
are real, and differ a little from machine to machine. Digests order the questions, so the other questions keep their
order if a machine lacks a package.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel

from mbd_core.command_line import command
from mbd_core.fields import DATA, OUTPUT, Flag
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.row_files.rows import read_file
from mbd_core.tasks.gsm_mini import generate
from mbd_core.tasks.split import Split, split_of

Row = dict[str, str]
"""`question`, and `answer`: the whole right answer."""


class PackageFields(BaseModel, extra="forbid", strict=True):
    """The JSON that `package-fields` asks for."""

    package: str
    version: str | None
    section: str | None
    maintainer: str | None
    size_kb: int | None
    homepage: str | None


FIELDS = tuple(PackageFields.model_fields)
EXTRACT = (
    "Write the package, version, section, maintainer, size_kb and homepage as JSON. "
    "What the text does not say is null.\n\n"
)
"""The question of `package-fields`, before the text."""

_SENTENCES: dict[str, tuple[str, ...]] = {
    "version": ("The version is {}.", "This is release {}.", "Version {} is current."),
    "section": ("It belongs to the section {}.", "You find it in {}.", "Its section is {}."),
    "maintainer": ("{} maintains it.", "It is maintained by {}.", "The maintainer is {}."),
    "size_kb": ("Installed, it takes {} kB.", "It needs {} kB on the disk.", "The installed size is {} kB."),
    "homepage": ("See {} for more.", "The project lives at {}.", "Its home page is {}."),
}
_FIRST = (
    "{package}: {description}.",
    "The package {package} is described as: {description}.",
    "{description}: that is {package}.",
)
_SHOWN = 0.8
"""The probability that the text states a field of the package; it always states the name."""


def package_fields(*, split: Split, seed: int) -> Iterator[Row]:
    """Texts about Debian's packages, and their fields as JSON."""
    for package in sorted(_packages(), key=lambda package: _digest(seed, package["package"])):
        if split_of(package["package"]) != split:
            continue
        rng = random.Random(f"package-fields/{seed}/{package['package']}")
        said = [name for name in FIELDS[1:] if package[name] is not None and rng.random() < _SHOWN]
        rng.shuffle(said)
        sentences = [rng.choice(_FIRST).format(**package)]
        sentences += [rng.choice(_SENTENCES[name]).format(package[name]) for name in said]
        record = {name: package[name] if name in (*said, "package") else None for name in FIELDS}
        yield {"question": EXTRACT + " ".join(sentences), "answer": json.dumps(record, ensure_ascii=False)}


def _digest(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}/{key}".encode()).digest()


def _packages() -> Sequence[dict[str, Any]]:
    command = ["apt-cache", "dumpavail"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise RuntimeError(f"{' '.join(command)}, which lists the packages of package-fields, failed: {reason}")
    return _listed(done.stdout)


@functools.lru_cache(maxsize=1)
def _listed(text: str) -> Sequence[dict[str, Any]]:
    """The packages of apt's lists; each split asks for them anew."""
    found = {}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", paragraph, flags=re.MULTILINE))
        description = fields.get("Description", "").strip(" .")
        version, size = fields.get("Version"), fields.get("Installed-Size", "")
        if len(description) < 12 or "Package" not in fields or not size.isdecimal() or len(version or "") > 24:
            continue
        maintainer = re.sub(r" *<.*", "", fields.get("Maintainer", "")).strip('"')
        found[fields["Package"]] = {
            "package": fields["Package"],
            "description": description,
            "version": version,
            "section": fields.get("Section"),
            "maintainer": maintainer or None,
            "size_kb": int(size),
            "homepage": fields.get("Homepage"),
        }
    return list(found.values())


_THIRD_PERSON = {"Do": "Does", "Go": "Goes", "Be": "Is", "Have": "Has", "Pass": "Passes"}
NO_VERBS = {"The", "This", "These", "That", "There", "An", "It", "If", "In", "On", "All", "Any", "Some", "Base"}
NO_VERBS |= {"Abstract", "Same", "Like", "Note", "Test", "No", "Not", "See", "To", "For", "With"}
REWRITE = "Rewrite in the third person, as 'Returns ...' for 'Return ...':\n\n"
"""The question of `third-person`, before the docstring's first sentence."""


def third_person(*, split: Split, seed: int) -> Iterator[Row]:
    """First sentences of Python's docstrings that begin with a verb, and the same sentences in the third person."""
    for sentence in sorted(_imperatives(), key=lambda sentence: _digest(seed, sentence)):
        if split_of(sentence) != split:
            continue
        yield {"question": REWRITE + sentence, "answer": third_person_of(sentence)}


def third_person_of(sentence: str) -> str:
    """A sentence that begins with a verb, in the third person."""
    verb, rest = sentence.split(" ", 1)
    return f"{_third(verb)} {rest}"


def _third(verb: str) -> str:
    if verb in _THIRD_PERSON:
        return _THIRD_PERSON[verb]
    if re.search(r"(s|sh|ch|x|z)$", verb):
        return verb + "es"
    return verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"


# A capital verb, then an article or the like, so that a noun does not count as a verb.
_IMPERATIVE = r"[A-Z][a-z]+ (a|an|the|all|any|this|each|and|one|whether|if|from) .{12,160}\."


@functools.cache
def _imperatives() -> Sequence[str]:
    """Distinct first sentences that begin with a verb. A word counts as a verb if at least three sentences begin with
    it."""
    found: set[str] = set()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test"} & {*path.relative_to(library).parts}:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                first = re.split(r"(?<=\.)\s|\n\n", " ".join(text.split("\n\n")[0].split()))[0]
                if re.fullmatch(_IMPERATIVE, first):
                    found.add(first)
    verbs = [sentence.split(" ", 1)[0] for sentence in found]
    known = {verb for verb in verbs if verbs.count(verb) >= 3 and verb not in NO_VERBS and not verb.endswith("s")}
    return [sentence for sentence in found if sentence.split(" ", 1)[0] in known]


def gsm8k(folder: Path, split: Split) -> Iterator[Row]:
    """GSM8K's own problems, without the calculator's marks. Its training file gives the valid split, too.

    Raises `ValueError` that names the file, and the line of a bad row.
    """
    for row in read_file(str(_gsm8k_file(folder, split))):
        question, answer = row.values.get("question"), row.values.get("answer")
        if not (isinstance(question, str) and isinstance(answer, str)):
            raise ValueError(f"{row.place}: question and answer must be texts, as in GSM8K's own files")
        own = "valid" if split_of(question) == "valid" else "train"
        if split in ("test", own):
            yield {"question": question, "answer": re.sub(r"<<.*?>>", "", answer)}


def _gsm8k_file(folder: Path, split: Split) -> Path:
    file = folder / ("test.jsonl" if split == "test" else "train.jsonl")
    if not file.is_file():
        raise ValueError(f"--gsm8k {folder} holds no {file.name}")
    return file


COUNTS = {"gsm-mini": 6_000, "package-fields": 6_000, "third-person": 1_600, "gsm8k": 2_400}
"""Training samples of each task."""
HELD_OUT = 500
"""The largest number of unseen problems of a task in a split."""
SEED = 7
NO_ROWS = {
    "gsm-mini": "",
    "package-fields": "there are no package lists of Debian; fetch them with apt-get update",
    "third-person": "the sources of this Python have no docstrings",
    "gsm8k": "the file of --gsm8k has no problem of this split",
}
"""Why a task may have no rows."""


def streams(gsm8k_folder: Path | None) -> dict[str, Callable[[Split], Iterator[Row]]]:
    """For each task, its rows by split. GSM8K is left out without a folder of its files."""
    known: dict[str, Callable[[Split], Iterator[Row]]] = {
        "gsm-mini": lambda split: generate(split=split, seed=SEED),
        "package-fields": lambda split: package_fields(split=split, seed=SEED),
        "third-person": lambda split: third_person(split=split, seed=SEED),
    }
    return known if gsm8k_folder is None else {**known, "gsm8k": lambda split: gsm8k(gsm8k_folder, split)}


def run(
    *,
    out: Annotated[Path, Flag("Folder to write.", OUTPUT, metavar="DIR")],
    gsm8k_folder: Annotated[
        Path | None, Flag("GSM8K's folder of train.jsonl and test.jsonl.", DATA, name="--gsm8k", metavar="DIR")
    ] = None,
) -> None:
    """Writes the conversations of the study on a real model, and unseen problems of each task.

    `mbd prepare` takes `train.jsonl`; `TASK-valid.jsonl` and `TASK-test.jsonl` hold question and answer.
    """
    if shutil.which("apt-cache") is None:
        raise ValueError("the task package-fields reads Debian's package lists by apt-cache, which is not here")
    if gsm8k_folder is not None:
        _gsm8k_file(gsm8k_folder, "train")
        _gsm8k_file(gsm8k_folder, "test")
    check_target_folder(out, KIND)
    samples: list[dict[str, Any]] = []
    with folder_beside(out, KIND) as folder:
        for task, stream in streams(gsm8k_folder).items():
            rows = list(itertools.islice(stream("train"), COUNTS[task]))
            if not rows:
                raise ValueError(f"there are no rows of {task}: {NO_ROWS[task]}")
            for row in rows:
                turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
                samples.append({"messages": turns})
            for split in ("valid", "test"):
                _write(folder / f"{task}-{split}.jsonl", list(itertools.islice(stream(split), HELD_OUT)))
            print(f"{task}: {len(rows):,} samples")
        random.Random(SEED).shuffle(samples)
        _write(folder / "train.jsonl", samples)
    print(f"wrote {out}")


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


KIND = "data of the study on a real model"

main = command(run, "python -m research real")
