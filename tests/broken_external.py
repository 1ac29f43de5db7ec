"""Models whose external data is not there, not whole, not inside, or not theirs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from broken_models import Mutation, parse, plain_model, save_on_disk
from onnx import TensorProto

Edit = Callable[[TensorProto], None]


def two_weights() -> onnx.ModelProto:
    """Two weights of different sizes, 4 x 3 and 3 floats."""
    return plain_model()


def entries(edit: Callable[[dict[str, str]], None], tensor: str = "weight") -> Callable[[Path], None]:
    """Change the entries that say where a tensor's data is."""

    def change(weight: TensorProto) -> None:
        given = {entry.key: entry.value for entry in weight.external_data}
        edit(given)
        del weight.external_data[:]
        for key, value in given.items():
            weight.external_data.add(key=key, value=value)

    return tensor_of(change, tensor)


def tensor_of(edit: Edit, tensor: str = "weight") -> Callable[[Path], None]:
    def change(path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        edit(next(one for one in model.graph.initializer if one.name == tensor))
        path.write_bytes(model.SerializeToString())

    return change


def put(**values: str) -> Callable[[Path], None]:
    return entries(lambda given: given.update(values))


def data(path: Path) -> Path:
    return path.with_name("model.data")


def removed(path: Path) -> None:
    data(path).unlink()


def a_folder(path: Path) -> None:
    data(path).unlink()
    data(path).mkdir()


def a_pipe(path: Path) -> None:
    data(path).unlink()
    os.mkfifo(data(path))


def unreadable_link(path: Path) -> None:
    data(path).unlink()
    data(path).symlink_to("model.data")


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(data(path), size)


def outside_by_link(path: Path) -> None:
    other = path.parent.parent / "elsewhere.data"
    data(path).rename(other)
    data(path).symlink_to(other)


def outside_by_dots(path: Path) -> None:
    data(path).rename(path.parent.parent / "dots.data")
    put(location="../dots.data")(path)
    entries(lambda given: given.update(location="../dots.data"), "bias")(path)


def out_and_back(path: Path) -> None:
    around = f"../{path.parent.name}/model.data"
    put(location=around)(path)
    entries(lambda given: given.update(location=around), "bias")(path)


def absolute(path: Path) -> None:
    put(location=str(data(path)))(path)


def inside_by_link(path: Path) -> None:
    data(path).rename(path.with_name("real.data"))
    data(path).symlink_to("real.data")


def hard_link(path: Path) -> None:
    os.link(data(path), path.with_name("same.data"))


def other_checksum(path: Path) -> None:
    was = hashlib.sha1(data(path).read_bytes()).hexdigest()
    put(checksum=was)(path)
    data(path).write_bytes(np.flip(np.fromfile(data(path), "u1")).tobytes())


def saved_twice(path: Path) -> None:
    save_on_disk(plain_model(), path)


def longer(path: Path) -> None:
    with data(path).open("ab") as file:
        file.write(bytes(70_000))


def bfloat16(tensor: TensorProto) -> None:
    tensor.data_type = TensorProto.BFLOAT16


def both(tensor: TensorProto) -> None:
    tensor.raw_data = bytes(48)


def strings(tensor: TensorProto) -> None:
    tensor.data_type = TensorProto.STRING


def without(key: str) -> Callable[[Path], None]:
    def change(given: dict[str, str]) -> None:
        del given[key]

    return entries(change)


def shifted(path: Path) -> None:
    entries(lambda given: given.update(offset=str(int(given["offset"]) - 4)), "bias")(path)


def _by_attribute() -> onnx.ModelProto:
    """A Constant inside a branch."""
    return parse("""
        held (bool c) => (float[2] y) {
            y = If (c) <
                then_branch = a () => (float[2] p) { p = Constant <value = float[2] {1, 2}> () },
                else_branch = b () => (float[2] q) { q = Constant <value = float[2] {3, 4}> () }
            >
        }
    """)


def _attribute_elsewhere(model: onnx.ModelProto) -> None:
    tensor = model.graph.node[0].attribute[0].g.node[0].attribute[0].t
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL


BY_NAME: dict[str, tuple[str, Callable[[Path], None]]] = {
    "the data file is gone": ("MO101", removed),
    "the data file is a folder": ("MO101", a_folder),
    "the data file is a pipe": ("MO101", a_pipe),
    "the data file is a link to itself": ("MO101", unreadable_link),
    "another location": ("MO101", put(location="other.data")),
    "a location with a null byte": ("MO101", put(location="a\0b")),
    "a location of 5000 letters": ("MO101", put(location="x" * 5000)),
    "backslashes": ("MO101", put(location="a\\model.data")),
    "the data file is cut": ("MO102", cut(50)),
    "the data file is empty": ("MO102", cut(0)),
    "an offset beyond the file": ("MO102", put(offset="4096")),
    "data above the folder": ("MO103", outside_by_dots),
    "data above the folder, and in it again": ("MO103", out_and_back),
    "an absolute location": ("MO103", absolute),
    "a link out of the folder": ("MO103", outside_by_link),
    "a link in the folder": ("MO104", inside_by_link),
    "a hard link": ("MO104", hard_link),
    "float32 bytes labelled bfloat16": ("MO105", tensor_of(bfloat16)),
    "a length too short": ("MO105", put(length="44")),
    "a length too long": ("MO105", put(length="52")),
    "no location": ("MO106", without("location")),
    "an empty location": ("MO106", put(location="")),
    "an offset that is no number": ("MO106", put(offset="0x0")),
    "a negative offset": ("MO106", put(offset="-4")),
    "a negative length": ("MO106", put(length="-48")),
    "an offset beyond 64 bits": ("MO106", put(offset="9" * 19)),
    "an unknown key": ("MO106", put(basepath="here")),
    "data inside and outside": ("MO106", tensor_of(both)),
    "strings outside": ("MO106", tensor_of(strings)),
    "another file of the same size": ("MO107", other_checksum),
    "a checksum of another file": ("MO107", put(checksum="00" * 20)),
    "saved twice": ("MO108", saved_twice),
    "a file too long": ("MO108", longer),
    "an offset inside the tensor before": ("MO109", shifted),
}

MUTATIONS = [
    *(
        # A dtype that is none of the nodes' is seen by others too.
        Mutation(code, name, two_weights, break_it, on_disk=True, also=("MO306", "MO321", "MO404"))
        for name, (code, break_it) in BY_NAME.items()
    ),
    Mutation("MO106", "a constant in a branch without a location", _by_attribute, _attribute_elsewhere),
]
