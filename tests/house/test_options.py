"""A field is said once: a configuration's annotations are its checks, its reader, its command line and its table."""

import re
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from jobs.option_tables import described_commands, page
from mbd_core.command_line import Changes, Fields, command, command_options, flag
from mbd_core.field_texts import value_of
from mbd_core.fields import (
    DATA,
    ENGINE,
    OUTPUT,
    Field,
    Flag,
    Ge,
    Gt,
    Le,
    Texts,
    changed,
    configuration,
    fields_of,
    load,
    words,
)

ROOT = Path(__file__).resolve().parents[2]


@configuration(panel=ENGINE)
class Sizes:
    rows: Annotated[int, Ge(1)] = 4
    """Rows."""
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Of the memory."""
    caching: bool = True
    """Keep
    blocks."""
    exact: bool = False
    """Row by row."""
    pages: Annotated[int | None, Ge(2)] = None
    """Pages."""
    lengths: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag(panel=DATA, commas=True)] = (4, 8)
    """Lengths."""
    seed: Annotated[int, Ge(-(2**63)), Le(2**63 - 1)] = 0
    """Of 64 bits."""


@configuration()
class Setup:
    model: str
    """A folder."""
    kind: Literal["cpu", "gpu"] | None = None
    """Device."""
    fields: Annotated[dict[str, Any], Flag(panel=DATA, metavar="JSON")] = field(default_factory=dict)
    """JSON."""
    weights: Annotated[dict[str, float], Flag(panel=DATA, metavar="JSON")] = field(default_factory=dict)
    """Numbers."""
    file: Annotated[Path | None, Flag(name="--from")] = None
    """A file."""
    tags: Texts = ()
    """Repeatable."""
    replicas: int | Sizes = 1
    """A number, or more."""
    secret: Annotated[tuple[Sizes, ...], Flag(name=False)] = ()
    """In files alone."""
    sizes: Sizes = Sizes()
    """Sizes."""


SEVEN = Sizes(exact=True, rows=7)


def run_line(line: list[str], calls: list[Any]) -> int:
    def run(setup: Setup, *, out: Annotated[Path, Flag("Folder.", OUTPUT)]) -> None:
        calls.append((setup, out))

    return command(run)(line)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rows": 0}, "rows=0 must be a whole number of at least 1"),
        ({"rows": True}, "rows=true must be a whole number"),
        ({"rows": 1.0}, "rows=1.0 must be"),
        ({"share": 0}, "share=0 must be a number above 0 and at most 1"),
        ({"share": float("nan")}, "share=NaN must be"),
        ({"share": "much"}, 'share="much" must be a number'),
        ({"caching": 1}, "caching=1 must be one of true, false"),
        ({"lengths": [4, 0]}, r"lengths=\[4, 0\] must be a list of whole numbers of at least 1"),
        ({"lengths": 4}, "lengths=4 must be a list"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number from -9223372036854775808 to 9223372036854775807"),
    ],
)
def test_a_value_outside_its_bounds_is_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Sizes(**values)
    with pytest.raises(ValueError, match=f"^sizes.{sentence}"):
        load(Setup, {"model": "m", "sizes": values})
    with pytest.raises(ValueError, match=f"^secret.1.{sentence}"):
        load(Setup, {"model": "m", "secret": [{}, values]})


def test_a_file_is_read_into_the_dataclasses() -> None:
    values = {"model": "m", "kind": "gpu", "file": "a/b", "tags": ["x"], "replicas": {"rows": 2}, "secret": [{}]}
    assert load(Setup, values) == Setup(
        model="m", kind="gpu", file=Path("a/b"), tags=("x",), replicas=Sizes(rows=2), secret=(Sizes(),)
    )
    assert load(Setup, {"model": "m", "sizes": {"share": 1, "lengths": [1]}}).sizes == Sizes(share=1, lengths=(1,))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model": "m", "modle": 1}, "unknown option 'modle'; known: model, kind"),
        ({"model": "m", "sizes": {"row": 1}}, "unknown option 'sizes.row'; known: rows"),
        ({"model": "m", "secret": [{"row": 1}]}, "unknown option 'secret.0.row'"),
        ({"model": "m", "secret": {"row": 1}}, r'secret={"row": 1} must be a list'),
        ({"model": "m", "replicas": {"rows": 0}}, "replicas.rows=0 must be a whole number of at least 1"),
        ({"model": "m", "replicas": {"row": 1}}, "unknown option 'replicas.row'; known: rows"),
        ({"model": "m", "replicas": "x"}, 'replicas="x" must be a whole number or an object with the fields of Sizes'),
        ({}, "option 'model' is missing"),
        ({"model": 1}, "model=1 must be a text"),
        ({"model": "m", "kind": "tpu"}, 'kind="tpu" must be one of null, "cpu", "gpu"'),
        ({"model": "m", "sizes": 3}, "sizes=3 must be an object with the fields of Sizes"),
        ([], r"\[\] must be an object"),
        ({"model": "m", "weights": {"a": "b"}}, r'weights={"a": "b"} must be an object whose values are numbers$'),
        ({"model": "m", "weights": 1}, "weights=1 must be an object whose values are numbers$"),
    ],
)
def test_what_a_file_must_not_say_is_named(values: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        load(Setup, values)


def test_a_command_line_is_derived_from_the_dataclasses(tmp_path: Path) -> None:
    calls: list[Any] = []
    assert run_line(["--model", "m", "--out", str(tmp_path)], calls) == 0
    assert calls.pop() == (Setup(model="m"), tmp_path)
    line = ["--model", "m", "--out", "o", "--rows", "3", "--no-caching", "--exact", "--pages", "9", "--lengths", "1,2"]
    line += ["--fields", '{"a": 1}', "--from", "f", "--tags", "x", "--tags", "y", "--kind", "cpu", "--replicas", "2"]
    assert run_line(line, calls) == 0
    sizes = Sizes(rows=3, caching=False, exact=True, pages=9, lengths=(1, 2))
    expected = Setup(model="m", kind="cpu", fields={"a": 1}, file=Path("f"), tags=("x", "y"), replicas=2, sizes=sizes)
    assert calls.pop() == (expected, Path("o"))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "many"], "--rows"),
        (["--share", "0"], "--share"),
        (["--pages", "1"], "--pages"),
        (["--lengths", "4,0"], "--lengths"),
        (["--lengths", ","], "--lengths"),
        (["--fields", "{"], "--fields"),
        (["--fields", "[]"], "--fields"),
        (["--kind", "tpu"], "--kind"),
        (["--secret", "x"], "--secret"),
        (["--no-exact"], "--no-exact"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_option(
    line: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["--model", "m", "--out", "o", *line], calls := []) == 2
    printed = capsys.readouterr()
    assert calls == [] and name in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


def test_help_has_every_option_with_its_bounds_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run_line(["--help"], [])
    text = capsys.readouterr().out
    rows = next(line for line in text.splitlines() if "--rows" in line)
    assert "(at least 1)" in rows and "Rows." in rows and "default: 4" in rows
    assert "--no-caching" in text and "--no-exact" not in text and "--secret" not in text
    assert text.index("Data") < text.index("Engine") < text.index("Output")


def test_help_says_from_what_a_default_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    pages = Annotated[int | None, Flag("Pages (default: all that fit)", DATA)]

    def run(
        changes: Annotated[dict[str, Any], Changes(Sizes, "rows", default="the recipe's")],
        *,
        most: pages = None,
        few: pages = 3,
    ) -> None:
        """Some."""

    assert command(run)(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows, most, few = (next(line for line in lines if f"--{name}" in line) for name in ("rows", "most", "few"))
    assert "[default: (the recipe's)]" in rows and "(default: all that fit)" in most
    assert "all that fit" not in few and "[default: 3]" in few


def test_a_command_takes_some_fields_or_the_changes_of_some() -> None:
    calls: list[Any] = []

    def run(
        sizes: Annotated[Sizes, Fields("rows", "share")] = SEVEN,
        *,
        changes: Annotated[dict[str, Any], Changes(Setup, "kind", "tags")],
        chosen: Annotated[dict[str, Any], Changes(Sizes, "pages", "caching")],
    ) -> None:
        calls.append((sizes, changes, chosen))

    main = command(run)
    assert main([]) == 0 and calls.pop() == (Sizes(exact=True, rows=7), {}, {})
    assert main(["--share", "0.1", "--tags", "a", "--no-caching"]) == 0
    assert calls.pop() == (Sizes(exact=True, rows=7, share=0.1), {"tags": ("a",)}, {"caching": False})
    assert main(["--exact"]) == 2 and main(["--pages", "1"]) == 2 and not calls
    assert [item.path for item in command_options(run)] == ["rows", "share", "kind", "tags", "pages", "caching"]


def test_set_reaches_every_field_and_its_refusals_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Any] = []

    def run(setup: Setup, changes: Annotated[dict[str, Any], Changes(Sizes)]) -> None:
        calls.append((setup, changes))

    main = command(run, shown=("model", "rows"))
    line = ["--model", "a", "--set", "sizes.share=0.25", "--set", "kind=gpu", "--set", 'fields={"a": 1}']
    line += [
        "--set",
        "lengths=1,2",
        "--set",
        "sizes.lengths=[3]",
        "--set",
        "sizes.pages=null",
        "--set",
        "caching=false",
    ]
    assert main(line) == 0
    setup, changes = calls.pop()
    assert setup == Setup(model="a", kind="gpu", fields={"a": 1}, sizes=Sizes(share=0.25, lengths=(3,)))
    assert changes == {"lengths": (1, 2), "caching": False}
    for setting, sentence in (
        ("sizes.share=2", "--set sizes.share=2 must be a number above 0 and at most 1"),
        ("sizes.share=much", "--set sizes.share=much must be a number"),
        ("sizes.shar=0.5", "there is no field sizes.shar; is 'sizes.share' meant?"),
        ("sizes.share", "say its value, as --set sizes.share=VALUE"),
        ("lengths=1,x", "--set lengths=1,x must be a list of whole numbers"),
    ):
        assert main(["--model", "a", "--set", setting]) == 2 and sentence in capsys.readouterr().err
    assert main(["--model", "a", "--pages", "3"]) == 2
    assert "No such option: --pages" in (text := capsys.readouterr().err) and "say --set pages=VALUE" in text
    assert not calls


def test_a_list_of_a_fixed_length_may_repeat_a_number() -> None:
    """Of other lists with commas each item counts once."""
    betas = Field(path="betas", hint=tuple[float, float], default=())
    lengths = Field(path="lengths", hint=tuple[int, ...], default=())
    assert value_of(betas, "0.9,0.9", "--betas") == (0.9, 0.9)
    assert value_of(lengths, "4,8,4", "--lengths") == (4, 8)


def test_the_fields_of_a_configuration_are_listed() -> None:
    rows, share, caching, *_ = fields_of(Sizes)
    assert (rows.name, rows.hint, rows.default) == ("rows", Annotated[int, Ge(1)], 4)
    assert words(rows.schema) == "a whole number of at least 1"
    assert (share.help, share.flag.panel, caching.help) == ("Of the memory.", ENGINE, "Keep blocks.")


def test_a_configuration_is_changed_by_what_a_file_says() -> None:
    setup = Setup(model="m", fields={"a": 1})
    values = {"sizes": {"rows": 2}, "fields": {"b": 2}, "replicas": {"rows": 3}}
    expected = replace(setup, sizes=Sizes(rows=2), fields={"a": 1, "b": 2}, replicas=Sizes(rows=3))
    assert changed(setup, values) == expected
    with pytest.raises(ValueError, match=r"^unknown option 'sizes.row'; known: rows.* is 'rows' meant"):
        changed(setup, {"sizes": {"row": 2}})


def test_the_page_of_options_is_current() -> None:
    current = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert current == page(), "write it anew: python -m jobs.option_tables > docs/reference/options.md"


def test_the_page_has_every_option_of_a_command() -> None:
    """In a row of its section, or by its name there and the same row in the section of a larger command."""
    commands = list(described_commands())
    assert {"mbd serve", "mbd sweep", "mbd doctor", "mbd report best"} <= {name for name, _, _ in commands}
    sections = {}
    for name, file, _ in commands:
        heading = f"## {name}, {file}\n"
        sections[name] = page().partition(heading)[2].partition("\n## ")[0].replace("\\|", "|")
    for name, _, main in commands:
        for item in main.options:
            shown = item.flag.metavar if item.flag.positional else flag(item)
            option = f"`{shown if main.shows(item) else item.path}`"
            (other,) = re.findall(rf"^As in `([^`]+)`:.* {re.escape(option)}[,.]", sections[name], re.MULTILINE) or [
                name
            ]
            (row,) = [line for line in sections[other].splitlines() if line.startswith(f"| {option} |")]
            assert item.help.replace("\\|", "|") in row, (name, option)


PATHS = re.compile(r"DIR|FILE|URL\b|=?PATH\b|MODEL")


@pytest.mark.parametrize("command", ["train", "prepare", "sweep", "rl", "serve"])
def test_an_option_that_is_a_path_says_who_opens_it(command: str) -> None:
    """On a cluster its machines may share no disk."""
    (main,) = (main for name, _, main in described_commands() if name == f"mbd {command}")
    of_cluster = [item for item in main.options if main.shows(item)]
    paths = [item for item in of_cluster if PATHS.search(item.flag.metavar or "") or "path" in words(item.schema)]
    paths += [item for item in of_cluster if item.name in ("model", "models")]
    assert paths
    not_files = {"endpoint"}  # a URL of HTTP
    assert [item.path for item in paths if item.flag.opened_by is None and item.name not in not_files] == []
