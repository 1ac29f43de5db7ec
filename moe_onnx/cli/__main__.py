"""``python -m moe_onnx.cli``."""

from moe_onnx.cli import main

main(prog_name="moe-onnx")
