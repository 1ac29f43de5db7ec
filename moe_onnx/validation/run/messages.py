"""What onnxruntime says, for people: without its frame, its source files and its signatures."""

from __future__ import annotations

import re

# A source file of a runtime with its line: a function as C++ writes it follows, or its bare name.
_FILE = r"[\w+-]+\.(?:h|hpp|cc|cpp|cxx|cu|cuh)"
_SOURCE = re.compile(rf"(?:[A-Za-z]:)?[\w.+-]*[/\\](?:[\w.+-]+[/\\])*{_FILE}(?::\d+|\(\d+\))?:?\s+")
_BARE_SOURCE = re.compile(rf"\b{_FILE}:\d+:?\s+(?:\w+\s+)?")
_CONDITION = " was false. "  # between what was not so and what that means
_NODE = re.compile(r"while running \w+ node")
_SHAPES = re.compile(r"\bshapes?\b|\bdimensions?\b|\bdims\b|\brank\b|\bchannels\b|broadcast", re.IGNORECASE)


def said(error: Exception) -> str:
    """The first line of an error, without onnxruntime's own prefix, places in its source, and its end."""
    text = (str(error).strip() or type(error).__name__).split("\n")[0]
    parts = text.split(" : ", 3)
    text = parts[3] if len(parts) == 4 and parts[0] == "[ONNXRuntimeError]" else text
    while place := _SOURCE.search(text):
        text = text[: place.start()] + _last_clause(text[place.end() :])
    text = _BARE_SOURCE.sub("", text)
    return text[:397] + "..." if len(text) > 400 else text.rstrip(". ")


def is_about_shapes(error: Exception) -> bool:
    """Whether a node that was running says that shapes do not fit."""
    return bool(_NODE.search(str(error))) and bool(_SHAPES.search(said(error)))


def _last_clause(text: str) -> str:
    """What a runtime says after the name of a C++ function, and the condition if that is all it says."""
    _, found, after = text.partition(_CONDITION)
    if found and after.strip():
        return after
    end = _end_of_signature(text)
    return text[end:].lstrip() or text


def _end_of_signature(text: str) -> int:
    """Where the name of a function ends, as C++ writes it: ``T ns::f(U<V>, W) const [with V = X]``."""
    name = re.match(r"(?:[\w:<>,&*~ ]|\(anonymous namespace\)|\{anonymous\}|operator\(\))+(?=\()", text)
    if name is None or "::" not in name[0]:
        return 0
    end = _closed(text, name.end(), "()")
    more = re.compile(r"\s*(const|noexcept|mutable|->\s*[\w:<>&*]+)|::(?:<lambda)").match(text, end)
    end = more.end() if more is not None else end
    template = re.compile(r"\s*(?=\[with )").match(text, end)
    return end if template is None else _closed(text, template.end(), "[]")


def _closed(text: str, start: int, pair: str) -> int:
    """Just behind the bracket that closes the one at ``start``."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if not depth:
            return at + 1
    return len(text)
