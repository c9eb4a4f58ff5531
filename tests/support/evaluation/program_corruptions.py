"""Systematic corruptions of a right program, one place at a time."""

import ast
import copy
from collections.abc import Callable, Iterator

SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
OPPOSITE = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def corruptions(program: str) -> Iterator[tuple[str, str]]:
    """The name of each corruption that fits the program, and the program with it at its last place."""
    for name, corrupt in RULES.items():
        module = ast.parse(program)
        for node in reversed(list(ast.walk(module))):
            if corrupt(node):
                yield name, ast.unparse(module)
                break
    lines = program.rstrip().split("\n")
    yield "truncated", "\n".join(lines[:-1]) + "\n"


def _off_by_one(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return True
    return False


def _sign(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return True
    return False


def _swapped_operands(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, SWAPPED):
        node.left, node.right = copy.copy(node.right), copy.copy(node.left)
        return True
    return False


def _opposite_comparison(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        node.ops[0] = OPPOSITE[type(node.ops[0])]()
        return True
    return False


RULES: dict[str, Callable[[ast.AST], bool]] = {
    "off by one": _off_by_one,
    "sign": _sign,
    "swapped operands": _swapped_operands,
    "opposite comparison": _opposite_comparison,
}
