"""What an operator is, as data: ``OpSpec`` and the shape language its checks are written in.

Every route (numpy, ONNX schema, Python custom op, reference evaluator, cards) reads the same
``OpSpec``, and :meth:`OpSpec.check` is where dtypes, attributes and shapes are checked: the numpy
functions call it with concrete sizes, ONNX shape inference with whatever is known. What takes values
to check (indices, how many pairs a map selects) is checked by the operators.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moe_onnx.errors import (
    ACLNN_ERR_INNER_TILING_ERROR,
    AttributeValueError,
    DtypeError,
    MissingInputError,
    RankError,
    ShapeError,
)

DOMAIN = "ascend.moe"
VERSION = 1  # of the domain
PACKAGE_VERSION = "0.1.0"

# The letters that shape signatures are written in.
AXES = {
    "T": "tokens",
    "H": "hidden size",
    "E": "experts",
    "K": "experts per token (top_k)",
    "C": "expert capacity, rows per expert",
    "A": "active rows (active_num)",
    "N": "routed rows: T*K, or E*C when padded",
    "R": "rows of expanded_x: T*K, or min(active_num, T*K)",
    "F": "expert hidden size",
    "G": "gate and up of an expert, side by side: 2 F",
    "P": "rows of permuted_tokens: N, or only as many as the routing map selects",
    "S": "factors of an update",
    "...": "any number of axes, the same in all tensors",
}
ANY = "..."  # the signature of a tensor of any rank

# float64 serves validation (finite differences on a graph lifted to double), see the contract.
FLOATS = ("float16", "bfloat16", "float32", "float64")
MASTERS = ("float32", "float64")  # what is summed up over many steps
INDICES = ("int32",)
MAPS = ("bool", "int8")

# Rows, tokens and experts are named by int32.
MAX_ROWS = 2**31 - 1
MAX_TOP_K = 512  # the source documents' limit on experts per token

# A size: a number, a symbolic name, or unknown. Only numbers are ever refused.
Dim = int | str | None
Shape = tuple[Dim, ...] | None


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of one input or output; an unknown dtype is ``""``, an unknown rank None.

    ``selected`` is how many elements of a routing map are non-zero, where its values are known.
    """

    dtype: str
    shape: Shape
    selected: int | None = None


@dataclass(frozen=True)
class Arg:
    """One input or output: its name, shape signature (``"T H"``, alternatives by ``|``), meaning.

    The signature ``"..."`` is any shape, the same for all tensors of a call that have it.
    """

    name: str
    axes: str
    doc: str
    dtypes: tuple[str, ...] = FLOATS
    type_var: str = "T"
    optional: bool = False
    differentiable: bool = False


@dataclass(frozen=True)
class Attr:
    """One attribute. ``default`` None with ``required`` False means: may be absent."""

    name: str
    kind: Literal["int", "bool", "ints"]
    doc: str
    rule: str
    legal: Callable[[Any], bool]
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class OpSpec:
    """An operator of the ``ascend.moe`` domain.

    ``shapes(inputs, attributes)`` checks ranks, sizes and limits and gives the outputs' shapes;
    ``reference(*inputs, **attributes)`` is the numpy meaning; ``body`` is the decomposition in ONNX
    text; ``gradient`` names the operator of the backward pass, if the operator has one; ``missing``
    refuses optional inputs that are absent but needed, ``mixes`` dtypes that do not go together;
    without the input ``copies_without`` the outputs are bit copies, which must not go through Casts.
    """

    name: str
    summary: str
    formula: str
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    attributes: tuple[Attr, ...]
    shapes: Callable[[Sequence[TensorInfo | None], Mapping[str, Any]], list[TensorInfo | None]]
    reference: Callable[..., Any]
    body: str
    source: str
    gradient: str | None = None
    missing: Callable[[Sequence[TensorInfo | None], Mapping[str, Any]], None] | None = None
    mixes: Callable[[Sequence[TensorInfo | None]], None] | None = None
    copies_without: str | None = None

    def check(
        self, inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[TensorInfo | None]]:
        """Check everything but index values, in the contract's order; give attributes and outputs.

        Raises:
            MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, LimitError.
        """
        inputs = [*inputs, *[None] * (len(self.inputs) - len(inputs))]
        self.check_required(inputs)
        if self.missing is not None:
            self.missing(inputs, attributes)
        for arg, info in zip(self.inputs, inputs, strict=True):
            if info is not None and info.dtype not in ("", *arg.dtypes) and not is_absent(arg, info):
                raise DtypeError(
                    f"{self.name}: '{arg.name}' must be one of {', '.join(arg.dtypes)}, "
                    f"got {info.dtype}. Convert it before the call.",
                    op=self.name,
                )
        if self.mixes is not None:
            self.mixes(inputs)
        legal = self.check_attributes(attributes)
        return legal, self.shapes(inputs, legal)

    def check_required(self, inputs: Sequence[Any]) -> None:
        """Refuse a call without a required input."""
        for arg, value in zip(self.inputs, inputs, strict=True):
            if value is None and not arg.optional:
                raise MissingInputError(
                    f"{self.name}: required input '{arg.name}' is missing. "
                    f"Pass a tensor of shape [{arg.axes}].",
                    op=self.name,
                )

    def check_attributes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in defaults and check names, kinds and ranges of attributes."""
        known = {attr.name: attr for attr in self.attributes}
        for name in attributes:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean '{close[0]}'?" if close else f"Legal: {', '.join(known) or 'none'}."
                raise AttributeValueError(f"{self.name}: unknown attribute '{name}'. {hint}", op=self.name)
        return {name: self._attribute(attr, attributes.get(name)) for name, attr in known.items()}

    def _attribute(self, attr: Attr, value: Any) -> Any:
        if value is None:
            if attr.required:
                raise AttributeValueError(
                    f"{self.name}: required attribute '{attr.name}' ({attr.kind}, {attr.rule}) "
                    "is missing. Write it out.",
                    op=self.name,
                )
            return attr.default
        try:
            if attr.kind == "ints":
                if isinstance(value, (bytes, bytearray)):
                    raise TypeError(value)
                legal: Any = tuple(_as_int(item) for item in value)
            elif attr.kind == "bool":
                legal = int(value) if type(value).__name__ in ("bool", "bool_") else _as_int(value)
            else:
                legal = _as_int(value)
        except TypeError:
            raise AttributeValueError(
                f"{self.name}: attribute '{attr.name}' must be {_KINDS[attr.kind]}, "
                f"got {value!r} of type {type(value).__name__}. Convert it before the call.",
                op=self.name,
            ) from None
        if not attr.legal(legal):
            raise AttributeValueError(
                f"{self.name}: attribute '{attr.name}' must be {attr.rule}, got {value!r}.",
                op=self.name,
            )
        return legal


_KINDS = {"int": "a 64-bit integer", "bool": "a boolean or 0/1", "ints": "a sequence of 64-bit integers"}


def _as_int(value: Any) -> int:
    # True is no count; operator.index refuses floats, strings and None by itself. ONNX has int64.
    if type(value).__name__ in ("bool", "bool_") or not -(2**63) <= operator.index(value) < 2**63:
        raise TypeError(value)
    return operator.index(value)


def is_absent(arg: Arg, info: TensorInfo | None) -> bool:
    """Whether an optional input is absent: None, or of shape exactly (0, 0)."""
    return info is None or (arg.optional and info.shape == (0, 0))


def presence(info: TensorInfo | None) -> bool | None:
    """Whether an optional input is there: False for None and shape (0, 0), None if that is not known."""
    if info is None or info.shape == (0, 0):
        return False
    if info.shape is None:
        return None
    # [0, ?] may turn out to be [0, 0]; any size that is known not to be 0 settles it.
    return True if len(info.shape) != 2 or any(isinstance(d, int) and d for d in info.shape) else None


def require_same_dtype(op: str, first: str, a: str, second: str, b: str, allowed: str = "") -> None:
    """Refuse companions of different dtypes (561002: each is supported, the mix is not)."""
    if a and b and a != b:
        raise DtypeError(
            f"{op}: '{second}' must have the dtype of '{first}' ({a}){allowed}, got {b}. "
            "Convert one of them.",
            op=op,
            aclnn_status=ACLNN_ERR_INNER_TILING_ERROR,
        )


class Axes:
    """Reads shapes by signature and remembers what each axis letter is.

    A letter means one size in one call, and ``"..."`` one shape, whose axes are called 0, 1, ... Sizes that
    are unknown agree with everything.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self._sizes: dict[str, tuple[Dim, str]] = {}
        self._any: tuple[str, tuple[Dim, ...]] | None = None  # the first tensor of any shape

    def read(self, *tensors: tuple[str, TensorInfo | None, str]) -> None:
        """Read ``(name, tensor, signature)`` triples: all ranks first, then all sizes."""
        known = [(n, t.shape, s.split()) for n, t, s in tensors if t is not None and t.shape is not None]
        for name, shape, letters in known:
            if letters == [ANY]:
                self._any = self._any or (name, shape)
                first, like = self._any
                if len(shape) != len(like):
                    raise RankError(
                        f"{self.op}: '{name}' must have the rank of '{first}', {len(like)}-D, shape "
                        f"{show(like)}, got {len(shape)}-D, shape {show(shape)}.",
                        op=self.op,
                    )
            elif len(shape) != len(letters):
                raise RankError(
                    f"{self.op}: '{name}' must be {len(letters)}-D, [{' '.join(letters)}], "
                    f"got {len(shape)}-D, shape {show(shape)}.",
                    op=self.op,
                )
        for name, shape, letters in known:
            axes = map(str, range(len(shape))) if letters == [ANY] else letters
            for letter, size in zip(axes, shape, strict=True):
                self.bind(
                    letter,
                    size,
                    f"'{name}', whose shape {show(shape)} is read as [{' '.join(letters)}]",
                )

    def bind(self, letter: str, size: Dim, where: str) -> None:
        """Say that ``letter`` is ``size``; refuse it if it is already another number."""
        before, there = self._sizes.get(letter, (None, ""))
        if isinstance(before, int) and isinstance(size, int) and before != size:
            raise ShapeError(
                f"{self.op}: axis {letter} ({AXES.get(letter, 'of any shape')}) is {before} in {there} but "
                f"{size} in {where}. "
                "They must be equal.",
                op=self.op,
            )
        if before is None or (isinstance(before, str) and isinstance(size, int)):
            self._sizes[letter] = (size, where)

    def __getitem__(self, letter: str) -> Dim:
        return self._sizes.get(letter, (None, ""))[0]

    @property
    def any_shape(self) -> Shape:
        """The shape of the tensors of any shape, as far as it is known; None: not even its rank."""
        return None if self._any is None else tuple(self[str(i)] for i in range(len(self._any[1])))

    def divide(self, letter: str, by: Dim, what: str) -> Dim:
        """Size of ``letter`` divided by ``by``, which must leave no rest."""
        size = self[letter]
        if by == 1:
            return size
        if not (isinstance(size, int) and isinstance(by, int)):
            return None
        if by == 0 and size == 0:
            return 0
        if by == 0 or size % by:
            raise ShapeError(
                f"{self.op}: {self._sizes[letter][1]}: axis {letter} ({AXES[letter]}) must be "
                f"divisible by {what}, got {size} and {by}.",
                op=self.op,
            )
        return size // by


def show(shape: Sequence[Dim]) -> str:
    """A shape as text, unknown sizes as ``?``."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"
