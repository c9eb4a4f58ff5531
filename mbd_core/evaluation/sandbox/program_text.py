"""The program in a model's answer: the lines that are Python, and the definitions that the wanted function reaches.

The rule is that of EvalPlus 0.3.1's sanitiser, stated anew:

1. A run is a range of lines that is Python as it stands. Of the answer's runs that define the function, the longest is
   taken, counted without blank lines; the first of equally long runs.
2. The imports and the definitions that the function reaches are kept. The first definition of a name counts. So
   drivers, tests and examples of use around the function neither run nor fail.

The sanitiser loses some functions, or definitions that they need, and right answers with them. Here no right answer is
lost in this way. Answers are read out of lists, quotes, tags and fences (`_parts`), or go on after the prompt
(`_continuation`). Functions that are decorated, return nothing, or are defined in an `if` or `try` are kept too. Names
mean what they mean in Python: a driver's `n` is not the function's own `n`. Names that the answer lacks come from the
prompt.
"""

import ast
import codeop
import html
import re
import symtable
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

FENCE = re.compile(r"^[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(?:```|~~~)[^\n`]*$", re.MULTILINE)
TAG = re.compile(r"</?(?:code|pre|answer|python|solution)\b[^>\n]{0,200}>|\[/?(?:PYTHON|CODE|ANSWER|BEGIN|DONE)\]")
SPAN = re.compile(r"(?<!`)(`{1,3})(?!`)(?:(?:python3?|py)[ \t])?([^`\n]+)\1(?!`)")
QUOTE = re.compile(r"^[ \t]*> ?", re.MULTILINE)
END_OF_REASONING = "</think>"
MOST_PARSED = 2_000_000  # characters of an answer, some seconds of work; after them only the runs found so far count
COST = 100  # of a parse, in characters
MOST_PARTS = 20
MOST_CUTS = 200
INCOMPLETE = ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # type: ignore[attr-defined]
BY_TEXT = frozenset(("eval", "exec", "globals", "locals", "vars"))  # these find names that no analysis sees


def extract_program(prompt: str, entry_point: str, text: str) -> str:
    """The program to run. An answer without code gives the prompt with the answer, a program that fails."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = _statements(_before(prompt, entry_point))
        answers = [text.rpartition(END_OF_REASONING)[2], text] if END_OF_REASONING in text else [text]
        programs = (
            *(_definition(answer, entry_point, before) for answer in answers),
            *(_continuation(prompt, entry_point, answer) for answer in answers),
        )
        return next((program for program in programs if program is not None), prompt + text)


def _definition(answer: str, entry_point: str, before: Sequence["Statement"]) -> str | None:
    """The program of the longest run that defines the function; a program whose function returns something is
    preferred."""
    if entry_point not in answer:
        return None
    silent, budget = None, Budget()
    for part in islice(_parts(answer, entry_point), MOST_PARTS):
        for run in python_runs(part, entry_point, budget):
            statements = _statements(run)
            kinds = {statement.kind for statement in statements if entry_point in statement.names}
            if kinds & {"usual", "other"}:
                return _reached(entry_point, statements, before)
            if "silent" in kinds and silent is None:
                silent = statements
    return None if silent is None else _reached(entry_point, silent, before)


def _parts(answer: str, entry_point: str) -> Iterator[str]:
    """The answer, and the parts of it that may be the code: indented, quoted, or between tags or marks."""
    yield answer
    definition = re.compile(rf"^([ \t]+)(?:async def|def|class)[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    for text in (answer, QUOTE.sub("", answer)) if QUOTE.search(answer) else (answer,):
        if text is not answer:
            yield text
        for match in definition.finditer(text):
            yield _indented(text, match.start(), match[1])
    tagged = TAG.split(answer)
    for part in tagged if len(tagged) > 1 else ():
        yield textwrap.dedent(part.strip("\n"))
        yield textwrap.dedent(html.unescape(part).strip("\n"))
    for match in SPAN.finditer(answer):
        if entry_point in match[2]:
            yield textwrap.dedent(match[2].strip("\n"))


def _indented(text: str, place: int, indent: str) -> str:
    """The lines around a place that are indented at least by `indent`, without it."""
    lines = text.split("\n")
    first = last = text.count("\n", 0, place)
    while first > 0 and (lines[first - 1].startswith(indent) or not lines[first - 1].strip()):
        first -= 1
    while last + 1 < len(lines) and (lines[last + 1].startswith(indent) or not lines[last + 1].strip()):
        last += 1
    return "\n".join(line.removeprefix(indent) for line in lines[first : last + 1])


def _continuation(prompt: str, entry_point: str, answer: str) -> str | None:
    """The prompt with a part of the answer as the function's body, or `None` if nothing of the answer can follow
    it."""
    parts = FENCE.split(answer)
    for part in (*parts[1::2], *parts[0::2]):
        code = _python_prefix(prompt + part) if part.strip() else None
        if code is not None and len(code.strip()) > len(prompt.strip()):
            statements = _statements(code)
            if any(entry_point in statement.names and statement.kind != "import" for statement in statements):
                return _reached(entry_point, statements, ())
    return None


def _before(prompt: str, entry_point: str) -> str:
    """The prompt's text before the function, if it is Python."""
    definition = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    text_before = prompt[: definition.start()] if definition else ""
    return text_before if _state(text_before) == "whole" else ""


CodeState = Literal["whole", "open", "bad"]


def _state(code: str) -> CodeState:
    """Whether code is Python, can never become Python, or may become it with further lines."""
    try:
        compile(code, "<answer>", "exec", INCOMPLETE)
    except SyntaxError as error:
        return "open" if error.msg == "incomplete input" else "bad"
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return "bad"
    return "whole"


def _python_prefix(code: str) -> str | None:
    """The longest run of lines from the start that is Python, found from the places of the errors."""
    lines = code.split("\n")
    end = len(lines)
    for _ in range(MOST_CUTS):
        if end <= 0:
            return None
        try:
            ast.parse("\n".join(lines[:end]))
        except SyntaxError as error:
            end = min(end, error.lineno or end) - 1
        except (ValueError, RecursionError, MemoryError):
            return None
        else:
            return "\n".join(lines[:end])
    return None


@dataclass
class Budget:
    """The number of characters that may still be parsed. A text that no model writes could take hours."""

    left: int = MOST_PARSED


def python_runs(text: str, name: str, budget: Budget) -> list[str]:
    """The runs that hold a name, each as long as it can be, the longest first. No run begins within another run,
    because the other run is longer."""
    return _Runs(lines=text.split("\n"), name=name, budget=budget).found()


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """The search for runs. It stops early at lines that no further line can mend, so it costs a few times the text's
    length."""

    lines: list[str]
    name: str
    budget: Budget

    def found(self) -> list[str]:
        """The runs, the longest first."""
        runs: list[tuple[int, str]] = []
        covered: set[int] = set()
        for start, line in enumerate(self.lines):
            is_indented = line[:1] in (" ", "\t") and not line.lstrip().startswith("#")
            if not line.strip() or is_indented or start in covered:
                continue
            if self.budget.left < 0:
                break
            end = self._end(start)
            if end is None:
                continue
            code = self._code(start, end)
            covered.update(start + node.lineno - 1 for node in ast.parse(code).body)
            if self.name in code:
                runs.append((sum(1 for line in self.lines[start:end] if line.strip()), code))
        return [code for _, code in sorted(runs, key=lambda run: -run[0])]

    def _code(self, start: int, end: int) -> str:
        return "\n".join(self.lines[start:end])

    def _state(self, start: int, end: int) -> CodeState:
        if self.budget.left < 0:
            return "bad"
        code = self._code(start, end)
        self.budget.left -= len(code) + COST
        return _state(code)

    def _end(self, start: int) -> int | None:
        """The end of the longest run from a line on, if there is one. Doubling steps, then halves, find the first line
        with which the code can never become Python. The run ends with the last earlier line with which the code is
        Python."""
        good, step = start, 1
        bad = len(self.lines) + 1
        while good < len(self.lines):
            end = min(good + step, len(self.lines))
            if self._state(start, end) == "bad":
                bad = end
                break
            good, step = end, 2 * step
        while bad - good > 1 and bad <= len(self.lines):
            middle = (good + bad) // 2
            good, bad = (good, middle) if self._state(start, middle) == "bad" else (middle, bad)
        return next((end for end in range(good, start, -1) if self._state(start, end) == "whole"), None)


StatementKind = Literal["import", "usual", "other", "silent"]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement of a module that defines names.

    kind   `usual`: a definition that EvalPlus's sanitiser keeps; `other`: a definition that it loses; `silent`: a
           function that returns nothing, which it loses too; `import`
    """

    node: ast.stmt
    code: str
    kind: StatementKind
    names: frozenset[str]

    @cached_property
    def uses(self) -> frozenset[str]:
        """The module's names, and the builtins, that it uses when it runs or is called."""
        try:
            return frozenset(_global_names(symtable.symtable(self.code, "<answer>", "exec")))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return frozenset(node.id for node in ast.walk(self.node) if isinstance(node, ast.Name))

    @property
    def is_future(self) -> bool:
        return isinstance(self.node, ast.ImportFrom) and self.node.module == "__future__"


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() if is_module else symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def _statements(code: str) -> list[Statement]:
    """The statements of a module that define names, without other statements and code that runs only as a script."""
    lines = code.split("\n")
    return [
        Statement(node=node, code=_code_of(node, lines), kind=kind, names=frozenset(_bound_names(node)))
        for node in ast.parse(code).body
        if (kind := _kind(node)) is not None
    ]


def _kind(node: ast.stmt) -> StatementKind | None:
    match node:
        case ast.Import() | ast.ImportFrom():
            return "import"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if not any(isinstance(inner, ast.Return | ast.Yield | ast.YieldFrom) for inner in ast.walk(node)):
                return "silent"
            return "other" if node.decorator_list else "usual"
        case ast.ClassDef():
            return "other" if node.decorator_list else "usual"
        case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name(), value=ast.expr()):
            return "usual"
        case ast.If(test=test) if any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(test)):
            return None
        case ast.Assign() | ast.If() | ast.Try() | ast.With():
            return "other"
    return "other" if type(node).__name__ in ("TypeAlias", "TryStar") else None


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement defines in its module."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        match waiting.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                pass
            case node:
                waiting += ast.iter_child_nodes(node)


def _code_of(node: ast.stmt, lines: Sequence[str]) -> str:
    """The statement's own text, without other statements on its lines."""
    decorators = getattr(node, "decorator_list", [])
    first, last = (decorators[0] if decorators else node).lineno - 1, node.end_lineno
    assert last is not None and node.end_col_offset is not None
    texts = [line.encode() for line in lines[first:last]]
    texts[-1] = texts[-1][: node.end_col_offset]
    texts[0] = texts[0] if decorators else texts[0][node.col_offset :]
    return b"\n".join(texts).decode()


def _reached(entry_point: str, answer: Sequence[Statement], before: Sequence[Statement]) -> str:
    """The imports and definitions that a function reaches, of the answer or else of the prompt, as a program."""
    kept: set[int] = set()
    waiting, seen = [entry_point], {entry_point}
    while waiting:
        name = waiting.pop()
        for statement in _defining(name, answer) or _defining(name, before):
            kept.add(id(statement))
            new = statement.uses - seen
            seen |= new
            waiting += new
    statements = [*before, *answer]
    is_by_text = not BY_TEXT.isdisjoint(seen)
    imports = [
        statement
        for statement in statements
        if statement.kind == "import"
        and (id(statement) in kept or statement.is_future or "*" in statement.names or is_by_text)
    ]
    imports.sort(key=lambda statement: not statement.is_future)
    rest = [statement for statement in statements if statement.kind != "import" and id(statement) in kept]
    return "".join(f"{statement.code}\n" for statement in (*imports, *rest))


def _defining(name: str, statements: Sequence[Statement]) -> list[Statement]:
    """The imports of a name, and its first definition; kinds are tried in order."""
    named = [statement for statement in statements if name in statement.names]
    imports = [statement for statement in named if statement.kind == "import"]
    kinds: tuple[StatementKind, ...] = ("usual", "other", "silent")
    definitions = (statement for kind in kinds for statement in named if statement.kind == kind)
    return [*imports, *islice(definitions, 1)]
