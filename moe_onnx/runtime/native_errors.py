"""The errors of native kernels: out of onnxruntime's text, as what the operators raise in Python.

A kernel in C++ can only give onnxruntime a status. Its text names the class, the aclnn status and, word
for word, what the same mistake is called in Python.
"""

from __future__ import annotations

import re

from moe_onnx import errors
from moe_onnx.errors import IndexValueError, MoeOnnxError

# In a run the node is named; while a session is made it is not.
_STATUS = re.compile(
    r"(?:running Moe\w+ node\. Name:'(?P<node>.*?)' Status Message: |during initialization: )"
    r"(?P<kind>[A-Z]\w+) \(aclnn (?P<status>\d+)\): (?P<text>(?P<op>Moe\w+): .*)",
    re.DOTALL,
)
_INDEX = re.compile(r": '(?P<name>\w+)' .*\bgot (?P<value>-?\d+) at position ", re.DOTALL)
_POSITION = re.compile(r"at position \[([\d, ]+)\]")


def native_error(text: str) -> MoeOnnxError | None:
    """The error of an operator that ``text``, onnxruntime's, tells of; None if it tells of none."""
    status = _STATUS.search(text)
    if status is None:
        return None
    kind = getattr(errors, status["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, MoeOnnxError)):
        return None
    words, op, node = status["text"], status["op"], status["node"]
    message = f"{words} (node '{node}')" if node else words
    error: MoeOnnxError
    if kind is IndexValueError:
        index = _INDEX.search(words)
        if index is None:
            return None
        # Of a value that occurs twice: the second time.
        position = tuple(int(number) for number in _POSITION.findall(words)[-1].split(","))
        value = int(index["value"])
        error = IndexValueError(message, op=op, input_name=index["name"], position=position, value=value)
    else:
        error = kind(message, op=op, aclnn_status=int(status["status"]))
    error.node = node or None
    return error
