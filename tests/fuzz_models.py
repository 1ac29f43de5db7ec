"""Models that are damaged at random, field by field, for what must bear any model that a file may hold.

Run by hand, ``python tests/fuzz_models.py SECONDS [SEED]`` damages and validates models for so long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import broken_models
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto

import moe_onnx
from moe_onnx.errors import ModelFileError
from moe_onnx.validation import validate as validation

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    22,
    99,
    127,
    128,
    1024,
    65536,
    2**31 - 1,
    -(2**31),
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -1.0, 0.5, 1e30, -1e-30, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "y", "ai.onnx", "ascend.moe", "com.microsoft", "N", "ü", "a/b\n'\"", "w" * 3000, "0", "-1")
SMALL = 20_000  # bytes of the models to start from
INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_ENUM,
)


@cache
def intact() -> list[ModelProto]:
    """The small models that the tables of mutations start from."""
    bases: dict[Callable[[], ModelProto], ModelProto] = {}
    for mutation in broken_models.mutations():
        if mutation.base not in bases:
            bases[mutation.base] = mutation.base()
    return [model for model in bases.values() if model.ByteSize() < SMALL]


def damaged(rng: Random) -> ModelProto:
    """One of the intact models with one to six fields deleted, doubled, swapped or set to something else."""
    model = broken_models.copy_of(rng.choice(intact()))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        messages = list(_messages(model))
        try:
            _damage(rng.choice(messages), messages, rng)
        except (TypeError, ValueError):
            continue  # protobuf does not take this value here, so no file can hold it
    return model


def cut_bytes(rng: Random) -> bytes:
    """An intact model's bytes with some of them changed, taken out or put in."""
    data = bytearray(rng.choice(intact()).SerializeToString())
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data))
        kind = rng.choice((0, 0, 0, 1, 2, 3, 3, 3))  # changed lengths are soon no protobuf any more
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.choice((1, 2, 50))]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 3))))
        else:
            data[at] ^= 1 << rng.randrange(8)
        if not data:
            break
    return bytes(data)


def parsed(data: bytes) -> ModelProto | None:
    """The model in some bytes, None where there is none."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return None
    return model


def failures(model: ModelProto, **options: Any) -> list[str]:
    """The checks that failed on a model, with their tracebacks."""
    try:
        report = moe_onnx.validate(model, **options)
    except ModelFileError:
        return []  # names that are no text: there is no model to check
    return [finding.found for finding in report if finding.code == validation.CHECK_FAILED.name]


def _messages(root: Message) -> list[Message]:
    found = [root]
    for message in found:  # grows
        for field, value in message.ListFields():
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                found += [value] if isinstance(value, Message) else list(value)
    return found


def _damage(message: Message, messages: list[Message], rng: Random) -> None:
    set_fields = [field for field, _ in message.ListFields()]
    any_field = rng.choice(message.DESCRIPTOR.fields)
    field = rng.choice(set_fields) if set_fields and rng.random() < 0.8 else any_field
    value = getattr(message, field.name)
    kind = rng.randrange(5)
    if kind == 0:
        message.ClearField(field.name)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _messages_of(message, field, messages, rng)
    elif hasattr(value, "append"):
        if kind == 1 and len(value):
            del value[rng.randrange(len(value))]
        elif kind == 2 and len(value) > 1:
            first, second = rng.randrange(len(value)), rng.randrange(len(value))
            value[first], value[second] = value[second], value[first]
        elif kind == 3 or not len(value):
            value.append(_scalar(field, messages, rng))
        else:
            value[rng.randrange(len(value))] = _scalar(field, messages, rng)
    else:
        setattr(message, field.name, _scalar(field, messages, rng))


def _messages_of(message: Message, field: FieldDescriptor, messages: list[Message], rng: Random) -> None:
    value = getattr(message, field.name)
    like = [one for one in messages if one.DESCRIPTOR is field.message_type and one is not message]
    # A copy first: a message may not be copied into its own inside.
    other = type(rng.choice(like))() if like else None
    if other is not None:
        other.CopyFrom(rng.choice(like))
    if not hasattr(value, "append"):
        value.SetInParent()
        if other is not None:
            value.CopyFrom(other)
        return
    kind = rng.randrange(4)
    if kind == 0 and len(value):
        del value[rng.randrange(len(value))]
    elif kind == 1 and len(value) > 1:
        items = [type(one).FromString(one.SerializeToString()) for one in value]
        rng.shuffle(items)
        del value[:]
        value.extend(items)
    elif other is not None:
        value.add().CopyFrom(other)
    else:
        value.add()


def _scalar(field: FieldDescriptor, messages: list[Message], rng: Random) -> Any:
    if field.cpp_type in INTEGERS:
        return rng.choice(NUMBERS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((b"", b"\0", b"\xff\xfe", b"x" * 48, bytes(rng.randrange(256) for _ in range(9))))
    if rng.random() < 0.5:
        return rng.choice(TEXTS)
    other = rng.choice(messages)
    texts = [v for f, v in other.ListFields() if f.type == FieldDescriptor.TYPE_STRING and isinstance(v, str)]
    return rng.choice(texts) if texts else rng.choice(TEXTS)


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start, count, found = time.monotonic(), 0, set()
    while time.monotonic() - start < seconds:
        rng = Random(f"{seed}/{count}")
        model = damaged(rng) if count % 3 else parsed(cut_bytes(rng))
        print(f"{seed}/{count}", file=sys.stderr, flush=True)  # the last one before the process died
        target = rng.choice((None, "ascend910b", "ascend950"))
        before = time.monotonic()
        for failure in [] if model is None else failures(model, target=target):
            last = failure.splitlines()[-3:]
            if tuple(last) not in found:
                found.add(tuple(last))
                print(f"--- {seed}/{count}\n{failure}", flush=True)
        if time.monotonic() - before > 5:
            print(f"--- {seed}/{count} took {time.monotonic() - before:.1f} s", flush=True)
        count += 1
    print(f"{count} models, {len(found)} failures")


if __name__ == "__main__":
    main()
