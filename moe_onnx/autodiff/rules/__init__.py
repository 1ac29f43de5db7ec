"""The gradient rules, grouped by family. Importing a family registers its rules."""

from moe_onnx.autodiff.rules import (
    activations,
    control,
    einsum,
    elementwise,
    indexing,
    matmul,
    moe,
    normalization,
    reduction,
    scattering,
    shaping,
    slicing,
)

FAMILIES = (
    activations,
    control,
    einsum,
    elementwise,
    indexing,
    matmul,
    moe,
    normalization,
    reduction,
    scattering,
    shaping,
    slicing,
)
