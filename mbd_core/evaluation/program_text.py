"""The program in a model's answer: fenced or bare, a whole function or the rest of one, with prose around it.

1. The answer is cut at its fence lines. The last part, those inside fences first, that defines the wanted function is
   taken; what the prompt defines before the function (imports, helpers) goes before it.
2. If no part defines it, the first fenced part, or else the text before any fence, goes on after the prompt.
A part is cut to the longest run of lines that is Python. Of the program only definitions, imports and assignments
stay: calls, loops and assertions at the top level are examples of use, or prose that happens to be Python.
"""

import ast
import re
import warnings

FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n`]*$", re.MULTILINE)
START = re.compile(r"^(?:from|import|def|async def|class|@|[A-Za-z_]\w*\s*=)", re.MULTILINE)
MOST_CUTS = 200


def extract_program(prompt: str, entry_point: str, text: str) -> str:
    """The program to run. An answer without code gives the prompt with the answer, which then fails as it stands."""
    parts = FENCE.split(text.replace("\r\n", "\n"))
    fenced, bare = parts[1::2], parts[0::2]
    for part in (*reversed(fenced), *reversed(bare)):
        program = _defining(part, entry_point)
        if program is not None:
            return _preamble(prompt, entry_point) + program
    for part in (*fenced, *bare):
        program = _continued(prompt, entry_point, part)
        if program is not None:
            return program
    return prompt + text


def _defining(part: str, entry_point: str) -> str | None:
    """The code in a part that defines the function by itself, or `None`."""
    definition = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", part, re.MULTILINE)
    if definition is None:
        return None
    starts = [match.start() for match in START.finditer(part, 0, definition.start())]
    for start in (*starts[:MOST_CUTS], definition.start()):
        code = _python_prefix(part[start:])
        if code is not None and _function(code, entry_point) is not None:
            return _definitions(code)
    return None


def _continued(prompt: str, entry_point: str, part: str) -> str | None:
    """The prompt with the part as the function's body, or `None` if nothing of the part can follow it."""
    if not part.strip():
        return None
    code = _python_prefix(prompt + part)
    if code is None or len(code.strip()) <= len(prompt.strip()) or _function(code, entry_point) is None:
        return None
    return _definitions(code)


def _preamble(prompt: str, entry_point: str) -> str:
    """What a prompt defines before the function."""
    definition = re.search(rf"^def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    before = prompt[: definition.start()] if definition else ""
    return before if _parse(before) is not None else ""


def _python_prefix(code: str) -> str | None:
    """The longest run of lines from the start that is Python, found from the places of the errors."""
    lines = code.split("\n")
    end = len(lines)
    for _ in range(MOST_CUTS):
        if end <= 0:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse("\n".join(lines[:end]))
        except SyntaxError as error:
            end = min(end, error.lineno or end) - 1
        except (ValueError, RecursionError, MemoryError):
            return None
        else:
            return "\n".join(lines[:end])
    return None


def _parse(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function(code: str, name: str) -> ast.stmt | None:
    module = _parse(code)
    found = [n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)] if module else []
    return next((node for node in found if node.name == name), None)


def _definitions(code: str) -> str:
    """The code without the top-level statements that define nothing; the others keep their lines."""
    module = _parse(code)
    assert module is not None
    lines = code.split("\n")
    kept: set[int] = set()
    dropped: set[int] = set()
    for node in module.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        (dropped if _defines_nothing(node) else kept).update(range(first, (node.end_lineno or first) + 1))
    return "\n".join("" if n in dropped and n not in kept else line for n, line in enumerate(lines, start=1))


def _defines_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr | ast.Assert | ast.For | ast.While | ast.Delete):
        return True
    return isinstance(node, ast.If) and "__name__" in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
