"""The gradient rules, grouped by family. Importing a family registers its rules."""

from moe_onnx.autodiff.rules import elementwise, indexing, matmul, moe, reduction, shaping

FAMILIES = (elementwise, indexing, matmul, moe, reduction, shaping)
