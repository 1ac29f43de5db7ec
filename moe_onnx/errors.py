"""Every error this package raises on purpose.

Each class derives from :class:`MoeOnnxError` *and* from the builtin that callers already catch, so
``except ValueError`` keeps working. ``aclnn_status`` is the return code the source documents define
for the same mistake (161001 missing tensor, 161002 unsupported dtype, 561002 everything else), or
``None`` where they define none.
"""

from __future__ import annotations

from collections.abc import Mapping

ACLNN_ERR_PARAM_NULLPTR = 161001
ACLNN_ERR_PARAM_INVALID = 161002
ACLNN_ERR_INNER_TILING_ERROR = 561002


class MoeOnnxError(Exception):
    """Base of all errors of this package.

    Attributes:
        aclnn_status: Return code of the source documents, or None.
        op: Operator the error is about, or None.
        node: Name of the graph node the error came from, set by ``moe_onnx.InferenceSession``.
    """

    aclnn_status: int | None = None
    op: str | None = None
    node: str | None = None

    def __init__(self, message: str, *, op: str | None = None, aclnn_status: int | None = None) -> None:
        super().__init__(message)
        if op is not None:
            self.op = op
        if aclnn_status is not None:
            self.aclnn_status = aclnn_status


class MissingInputError(MoeOnnxError, ValueError):
    """A required tensor is absent (aclnn 161001)."""

    aclnn_status = ACLNN_ERR_PARAM_NULLPTR


class DtypeError(MoeOnnxError, ValueError, TypeError):
    """A dtype is unsupported (161002), or does not go with its companions (561002)."""

    aclnn_status = ACLNN_ERR_PARAM_INVALID


class AttributeValueError(MoeOnnxError, ValueError):
    """An attribute is missing, misspelt, of the wrong kind or out of range (561002)."""

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR


class RankError(MoeOnnxError, ValueError):
    """A tensor has the wrong number of dimensions (561002)."""

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR


class ShapeError(MoeOnnxError, ValueError):
    """Two dimensions that must agree do not (561002)."""

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR


class LimitError(MoeOnnxError, ValueError):
    """A documented size limit is exceeded, such as ``top_k <= 512`` (561002)."""

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR


class IndexValueError(MoeOnnxError, ValueError, IndexError):
    """An index tensor holds a value out of range, or one that may occur only once twice (561002).

    Attributes:
        input_name: Name of the index tensor.
        position: Position of the first offending element; for a duplicate, its second occurrence.
        value: The offending value.
    """

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR

    def __init__(
        self, message: str, *, op: str, input_name: str, position: tuple[int, ...], value: int
    ) -> None:
        super().__init__(message, op=op)
        self.input_name = input_name
        self.position = position
        self.value = value


class RoutingMapError(MoeOnnxError, ValueError):
    """A routing map selects more experts than there are slots (561002)."""

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR


class ModelError(MoeOnnxError, ValueError):
    """A model uses ``ascend.moe`` operators in a way that no route can run."""


class OptionError(MoeOnnxError, ValueError):
    """An option of this package has an illegal value; the message lists the legal ones."""


class BodyCheckError(MoeOnnxError, ValueError):
    """A rule is broken that a function body checks; it cannot say by which element (561002)."""

    aclnn_status = ACLNN_ERR_INNER_TILING_ERROR


class ConfigError(MoeOnnxError, ValueError):
    """A config, optimizer or recipe has an illegal value; the message names field, value and rule."""


class GradientError(MoeOnnxError, ValueError):
    """A gradient cannot be had: no rule, or no differentiable path; the message names the path."""


class BatchError(MoeOnnxError, ValueError):
    """A batch does not fit the graph: name, shape, dtype or a token id; no state has changed."""


class NonFiniteError(MoeOnnxError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite; no state has changed.

    Attributes:
        metrics: What the step had computed.
    """

    def __init__(self, message: str, *, metrics: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.metrics = metrics or {}


class CheckpointError(MoeOnnxError, ValueError):
    """A checkpoint is corrupt or foreign; names file, tensor, expected and found. No state has changed."""


class DataError(MoeOnnxError, ValueError):
    """A file of tokens cannot be used; names file, position, value and legal range."""


class ModelFileError(MoeOnnxError, ValueError):
    """A file is not there, cannot be read, or is not what it should be; names the file."""


class ValidationError(MoeOnnxError, ValueError):
    """A validation found errors; the message lists them.

    Attributes:
        report: The whole :class:`moe_onnx.validation.findings.Report`.
    """

    def __init__(self, message: str, *, report: object) -> None:
        super().__init__(message)
        self.report = report


class VerificationError(ModelError):
    """A rewritten model does not do what it did, or that could not be shown; the original is as it was.

    Attributes:
        output: Name of the output that differed most, ``""`` where none was compared.
        difference: By how much, as a share of its largest value.
        inputs: With which inputs, by name; empty where it was not run.
    """

    def __init__(
        self,
        message: str,
        *,
        output: str = "",
        difference: float = 0.0,
        inputs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.output = output
        self.difference = difference
        self.inputs = dict(inputs or {})
