"""Mixture-of-Experts training graphs in ONNX, run by stock onnxruntime.

Importing the package registers the operators of the domain ``ascend.moe``: their schemas with onnx,
their Python kernels with onnxruntime-extensions. Native kernels are registered by the sessions that use
them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_onnx.adapters.function_body import function_body
from moe_onnx.adapters.python_ops import register_python_ops as _register_python_ops
from moe_onnx.adapters.reference_evaluator import reference_ops
from moe_onnx.adapters.schema import register_schemas as _register_schemas
from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.learning_rate import LearningRate
from moe_onnx.build.optimizers import SGD, AdamW
from moe_onnx.errors import (
    AttributeValueError,
    BatchError,
    BodyCheckError,
    CheckpointError,
    ConfigError,
    DataError,
    DtypeError,
    GradientError,
    IndexValueError,
    LimitError,
    MissingInputError,
    ModelError,
    ModelFileError,
    MoeOnnxError,
    NonFiniteError,
    OptionError,
    RankError,
    RoutingMapError,
    ShapeError,
    ValidationError,
    VerificationError,
)
from moe_onnx.kernels.native import native_library_path
from moe_onnx.operators.moe_adam_w import moe_adam_w
from moe_onnx.operators.moe_finalize_routing_v2 import moe_finalize_routing_v2
from moe_onnx.operators.moe_finalize_routing_v2_grad import moe_finalize_routing_v2_grad
from moe_onnx.operators.moe_grouped_matmul import moe_grouped_matmul
from moe_onnx.operators.moe_grouped_matmul_weight_grad import moe_grouped_matmul_weight_grad
from moe_onnx.operators.moe_init_routing_v2 import moe_init_routing_v2
from moe_onnx.operators.moe_init_routing_v2_grad import moe_init_routing_v2_grad
from moe_onnx.operators.moe_square_sum import moe_square_sum
from moe_onnx.operators.moe_swi_glu import moe_swi_glu
from moe_onnx.operators.moe_swi_glu_grad import moe_swi_glu_grad
from moe_onnx.operators.moe_token_permute_with_routing_map import moe_token_permute_with_routing_map
from moe_onnx.operators.moe_token_permute_with_routing_map_grad import (
    moe_token_permute_with_routing_map_grad,
)
from moe_onnx.operators.moe_token_unpermute_with_routing_map import (
    moe_token_unpermute_with_routing_map,
)
from moe_onnx.operators.moe_token_unpermute_with_routing_map_grad import (
    moe_token_unpermute_with_routing_map_grad,
)
from moe_onnx.rewrite.legalize import add_function_bodies
from moe_onnx.runtime.data import TokenDataset
from moe_onnx.runtime.register import register, register_each_once
from moe_onnx.runtime.session import InferenceSession
from moe_onnx.spec import PACKAGE_VERSION

if TYPE_CHECKING:
    from moe_onnx.autodiff.differentiate import differentiate
    from moe_onnx.autodiff.registry import register_gradient
    from moe_onnx.build.training_graph import TrainingGraph, build_training_graph
    from moe_onnx.huggingface.pretrained import Pretrained, from_pretrained
    from moe_onnx.huggingface.saving import save_pretrained
    from moe_onnx.imported.training import training_graph_from
    from moe_onnx.inspection.inspection import inspect
    from moe_onnx.runtime.checkpoint import load_checkpoint, save_checkpoint
    from moe_onnx.runtime.generate import generate
    from moe_onnx.runtime.loss_scale import LossScale
    from moe_onnx.runtime.train import train
    from moe_onnx.runtime.training_session import TrainingSession
    from moe_onnx.validation.device.compare import compare
    from moe_onnx.validation.rewriting.rewrite import rewrite_model
    from moe_onnx.validation.validate import validate

__version__ = PACKAGE_VERSION

__all__ = [
    "SGD",
    "AdamW",
    "AttributeValueError",
    "BatchError",
    "BodyCheckError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DtypeError",
    "GradientError",
    "IndexValueError",
    "InferenceSession",
    "LearningRate",
    "LimitError",
    "LossScale",
    "MissingInputError",
    "ModelError",
    "ModelFileError",
    "MoeLMConfig",
    "MoeLayerConfig",
    "MoeOnnxError",
    "NonFiniteError",
    "OptionError",
    "Pretrained",
    "RankError",
    "RoutingMapError",
    "ShapeError",
    "TokenDataset",
    "TrainingGraph",
    "TrainingSession",
    "ValidationError",
    "VerificationError",
    "__version__",
    "add_function_bodies",
    "build_training_graph",
    "compare",
    "differentiate",
    "from_pretrained",
    "function_body",
    "generate",
    "inspect",
    "load_checkpoint",
    "moe_adam_w",
    "moe_finalize_routing_v2",
    "moe_finalize_routing_v2_grad",
    "moe_grouped_matmul",
    "moe_grouped_matmul_weight_grad",
    "moe_init_routing_v2",
    "moe_init_routing_v2_grad",
    "moe_square_sum",
    "moe_swi_glu",
    "moe_swi_glu_grad",
    "moe_token_permute_with_routing_map",
    "moe_token_permute_with_routing_map_grad",
    "moe_token_unpermute_with_routing_map",
    "moe_token_unpermute_with_routing_map_grad",
    "native_library_path",
    "reference_ops",
    "register",
    "register_gradient",
    "rewrite_model",
    "save_checkpoint",
    "save_pretrained",
    "train",
    "training_graph_from",
    "validate",
]

_register_schemas()
_register_python_ops()
register_each_once()

# What needs onnx-ir, which takes as long to import as everything else: on first use.
_ON_FIRST_USE = {
    "differentiate": "moe_onnx.autodiff.differentiate",
    "register_gradient": "moe_onnx.autodiff.registry",
    "TrainingGraph": "moe_onnx.build.training_graph",
    "build_training_graph": "moe_onnx.build.training_graph",
    "Pretrained": "moe_onnx.huggingface.pretrained",
    "from_pretrained": "moe_onnx.huggingface.pretrained",
    "save_pretrained": "moe_onnx.huggingface.saving",
    "load_checkpoint": "moe_onnx.runtime.checkpoint",
    "save_checkpoint": "moe_onnx.runtime.checkpoint",
    "generate": "moe_onnx.runtime.generate",
    "LossScale": "moe_onnx.runtime.loss_scale",
    "train": "moe_onnx.runtime.train",
    "TrainingSession": "moe_onnx.runtime.training_session",
    "training_graph_from": "moe_onnx.imported.training",
    "inspect": "moe_onnx.inspection.inspection",
    "compare": "moe_onnx.validation.device.compare",
    "rewrite_model": "moe_onnx.validation.rewriting.rewrite",
    "validate": "moe_onnx.validation.validate",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_ON_FIRST_USE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
