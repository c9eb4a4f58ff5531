"""A text without Markdown and HTML, and its bold parts, which may be its answer."""

import re

from mbd_core.evaluation.tasks.answers.notation import ascii_notation

_TAGS = re.compile(
    r"</?(?:b|strong|em|i|u|span|div|p|code|mark|center|font|big|small|sub|sup|h[1-6]|td|th|tr|table)\b[^<>]*>", re.I
)
_ANSWER_TAG = re.compile(r"</?(?:final_?)?answer>", re.I)
_LINE_MARKS = (
    (re.compile(r"^[ \t]*(?:```|~~~)[\w+-]*[ \t]*$", re.MULTILINE), ""),  # fences of code
    (
        re.compile(r"^[ \t]*\|?(?:[ \t]*:?-{3,}:?[ \t]*\|)+(?:[ \t]*:?-{3,}:?[ \t]*)?$", re.MULTILINE),
        "",
    ),  # tables' rules
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$", re.MULTILINE), ""),  # rules
    (re.compile(r"^[ \t]{0,3}(?:>[ \t]?)+", re.MULTILINE), ""),  # quotes
    (re.compile(r"^[ \t]{0,3}(?:#{1,3}|#{5,6})[ \t]+", re.MULTILINE), ""),  # headings; `####` marks an answer
    (re.compile(r"^[ \t]*[-*+\u2022][ \t]+(?=\S)", re.MULTILINE), ""),  # items
    (re.compile(r"^([ \t]*)\d{1,2}[.)][ \t]+(?=[A-Z*_])", re.MULTILINE), r"\1"),  # numbers of items
)
_STRUCK = re.compile(r"~~(?=\S)[^~\n]{1,500}?~~")
_CODE = re.compile(r"(`{1,2})(?!`)([^`\n]{1,500}?)\1(?!`)")
_BOLD = re.compile(
    r"(?<![\w)\]}*])(?<!\\)\*\*\*?(?=[^\s*])([^*\n]{1,500}?)(?<=[^\s*])\*\*\*?|(?<=[A-Za-z]{2})\*\*(\S[^*\n]{0,500}?)\*\*"
)
_BOLD_LOW = re.compile(r"(?<![\w)\]}\\])__(?=\S)([^_\n]{1,500}?)(?<=\S)__(?!\w)")
_ITALIC = re.compile(r"(?<![\w\\*)\]}])\*(?=[^\s*])([^*\n]{1,500}?)(?<=[^\s*])\*(?![\w*(])")
_ITALIC_LOW = re.compile(r"(?<![\w\\)\]}$])_(?=[^\s_{])([^_\n]{1,500}?)(?<=[^\s_])_(?![\w{])")
_STRAY = re.compile(r"(?<=[\w.$)])\*\*+(?=\s|$)|^\*\*+(?=\S)", re.MULTILINE)
_TEXT_ANSWER = re.compile(r"\\text(?:bf|it)?\{([^{}]*\banswers?\b[^{}]*)\}", re.I)
_LINE_OF_TABLE = re.compile(r"^[ \t]*\|(.*\|.*)\|[ \t]*$", re.MULTILINE)


def without_markdown(text: str) -> str:
    """The text without marks of emphasis, headings, lists, code, tables and HTML, and without struck-out text."""
    text = _ANSWER_TAG.sub(lambda tag: "\n" if tag[0][1] == "/" else "\nAnswer: ", _TAGS.sub("", text))
    text = _STRUCK.sub("", re.sub(r"<br\s*/?>", "\n", text))
    for pattern, replacement in _LINE_MARKS[:2]:
        text = pattern.sub(replacement, text)
    text = _LINE_OF_TABLE.sub(lambda line: re.sub(r"[ \t]*\|[ \t]*", " : ", line[1]).strip(), text)
    for pattern, replacement in _LINE_MARKS[2:]:
        text = pattern.sub(replacement, text)
    text = _CODE.sub(r"\2", _TEXT_ANSWER.sub(r"\1", text))
    for _ in range(2):
        text = _BOLD.sub(lambda bold: bold[1] or bold[2], text)
        text = _ITALIC.sub(r"\1", _BOLD_LOW.sub(r"\1", text))
    return _STRAY.sub("", _ITALIC_LOW.sub(r"\1", text))


def emphasised(text: str) -> list[str]:
    """The bold texts of the last paragraph that has words, if no equation follows them."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if re.search(r"\w", part)]
    if not paragraphs:
        return []
    bold = list(_BOLD.finditer(paragraphs[-1]))
    if not bold or "=" in paragraphs[-1][bold[-1].end() :]:
        return []
    return [ascii_notation(match[1] or match[2]).strip().rstrip(".") for match in bold]
