"""Whether a message holds program text.

In: a message that its caller has cut to a bounded length. Out: a boolean. Looks at the ends of lines with string methods, so
the time is linear and no pattern goes back. Pure; loop thread.
"""

from __future__ import annotations

# One line that looks like code can be prose about code; three are code.
_CODE_LINES = 3
# Lines looked at: code shows early, and a thousand lines of nothing take below a millisecond.
_MAX_LINES = 1000

_FENCES = ("```", "~~~")
_ENDS = (";", "{", "}", "};", "});", "})", ");", "},")
# How a line of code begins, and what must follow on it, so that a sentence with the same first word is none.
_BEGINNINGS = {
    "def ": "(", "async def ": "(", "class ": ":", "import ": "", "from ": " import ", "return ": "(", "@": "(",
    "#include": "", "#define ": " ", "function ": "(", "const ": "=", "let ": " = ", "var ": " = ", "export ": "(", "fn ": "(",
    "func ": "(", "pub ": "(", "public ": "(", "private ": "(", "static ": "(", "for (": ")", "if (": ")", "while (": ")",
    "SELECT ": " FROM ", "INSERT INTO ": "(", "CREATE TABLE ": "(", "</": ">", "$ ": " ",
}  # fmt: skip
_FIRSTS = tuple(_BEGINNINGS)


def holds_code(message: str) -> bool:
    """A fenced block, or several lines that begin or end as those of common languages do."""
    lines = 0
    for line in message.split("\n", _MAX_LINES)[:_MAX_LINES]:
        line = line.strip()
        if line.startswith(_FENCES):
            return True
        if line.endswith(_ENDS) or (line.startswith(_FIRSTS) and _begins(line)):
            lines += 1
            if lines == _CODE_LINES:
                return True
    return False


def _begins(line: str) -> bool:
    return any(line.startswith(first) and follows in line[len(first):] for first, follows in _BEGINNINGS.items())
