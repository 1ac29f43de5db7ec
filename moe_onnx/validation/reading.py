"""Reading a model file, or saying in a sentence why it is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto

from moe_onnx.errors import ModelFileError

PROTOBUF_LIMIT = 2**31 - 1  # bytes of one message

# How files of other formats begin, that people give by mistake.
_MAGIC = (
    (b"PK\x03\x04", "a zip archive, as .pt, .npz and .mar files are"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x93NUMPY", "an array of numpy"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\x80\x02", "a pickle, as old .pt files are"),
    (b"version https://git-lfs", "a pointer of git-lfs: the model itself was not downloaded (git lfs pull)"),
    (b"<!DOCTYPE", "an HTML page, as a failed download gives"),
    (b"<html", "an HTML page, as a failed download gives"),
)


def read_model(path: Path) -> ModelProto:
    """The model in a file; the data of external tensors stays where it is.

    Raises:
        ModelFileError: If there is no file, or it is not a model; says what it looks like.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        dangling = " The link leads nowhere." if path.is_symlink() else ""
        raise ModelFileError(f"'{path}': no such file.{dangling}") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"'{path}' cannot be read: {_reason(error)}.") from None
    if stat.S_ISDIR(found.st_mode):
        raise ModelFileError(f"'{path}' is a folder; give a model file. Models in it: {_models_in(path)}.")
    if not stat.S_ISREG(found.st_mode):
        raise ModelFileError(f"'{path}' is no regular file.")
    if not found.st_size:
        raise ModelFileError(f"'{path}' is no ONNX model: it is empty.")
    if found.st_size > PROTOBUF_LIMIT:
        raise ModelFileError(
            f"'{path}' cannot be read: it has {found.st_size} bytes, and no reader takes more than "
            f"{PROTOBUF_LIMIT} in one model file{_looks(path)}. Weights of that size belong into external "
            "data: onnx.save(..., save_as_external_data=True)."
        )
    try:
        # By its bytes, whatever the file is called: onnx.load reads text by some suffixes.
        model = onnx.load_from_string(path.read_bytes())
    except DecodeError:
        raise ModelFileError(
            f"'{path}' is no ONNX model: its {found.st_size} bytes are not a whole ModelProto. It may have "
            f"been cut off, or be of another format{_looks(path)}."
        ) from None
    except OSError as error:
        raise ModelFileError(f"'{path}' cannot be read: {_reason(error)}.") from None
    if not model.graph.ListFields() and not model.functions:
        raise ModelFileError(f"'{path}' is no ONNX model: it has no graph{_looks(path)}.")
    if where := not_text(model):
        raise ModelFileError(f"'{path}' is no ONNX model: its {where} holds bytes that are no text in UTF-8.")
    return model


def not_text(model: ModelProto) -> str:
    """Where a model has a string that is no UTF-8, such as ``"graph.node.name"``, or ``""``.

    protobuf reads such models, and gives ``bytes`` where ``str`` is promised: no tool expects them.
    """
    waiting: list[tuple[Message, str]] = [(model, "")]
    while waiting:
        message, where = waiting.pop()
        if isinstance(message, TensorProto):  # not by its fields, whose data would be copied
            texts = [message.name, message.doc_string]
            texts += [text for entry in message.external_data for text in (entry.key, entry.value)]
            if bytes in map(type, texts):
                return f"{where}.name"
            continue
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_STRING:
                if type(value) is bytes or (type(value) is not str and bytes in map(type, value)):
                    return f"{where}.{field.name}".lstrip(".")
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                inner = f"{where}.{field.name}"
                waiting += [(value, inner)] if isinstance(value, Message) else [(one, inner) for one in value]
    return ""


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


def _models_in(folder: Path) -> str:
    try:
        return ", ".join(sorted(path.name for path in folder.glob("*.onnx"))) or "none"
    except OSError as error:
        return f"not known, {_reason(error)}"


def _looks(path: Path) -> str:
    """``" (it looks like ...)"``, or nothing."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError:
        return ""
    looks = next((what for magic, what in _MAGIC if start.startswith(magic)), "")
    if not looks and start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < os.path.getsize(path):
        looks = "a safetensors file"
    if not looks and b"\0" not in start:
        text = start[:500].decode("ascii", "replace")
        if all(sign in "\t\n\f\r" or (sign.isascii() and sign.isprintable()) for sign in text):
            looks = "text"
    if not looks and _is_tensor(path):
        looks = "a single onnx.TensorProto"
    return f" (it looks like {looks})" if looks else ""


def _is_tensor(path: Path) -> bool:
    """Whether the file is what onnx's tests keep their inputs and outputs in."""
    tensor = onnx.TensorProto()
    try:
        if os.path.getsize(path) > PROTOBUF_LIMIT:
            return False
        tensor.ParseFromString(path.read_bytes())
    except (DecodeError, OSError):
        return False
    return bool(tensor.data_type) and not tensor.data_location
