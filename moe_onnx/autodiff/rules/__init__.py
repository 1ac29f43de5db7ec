"""The gradient rules, grouped by family. Importing a family registers its rules."""

from moe_onnx.autodiff.rules import (
    activations,
    elementwise,
    indexing,
    matmul,
    moe,
    normalization,
    reduction,
    shaping,
)

FAMILIES = (activations, elementwise, indexing, matmul, moe, normalization, reduction, shaping)
