"""From ``OpSpec`` to the worlds that run operators: onnx, its reference evaluator, onnxruntime."""
