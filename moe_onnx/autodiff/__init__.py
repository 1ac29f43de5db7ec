"""Reverse-mode differentiation of ONNX graphs: rules by operator, and the walk that uses them."""
