"""Layers of ``ascend.moe`` -> ``com.microsoft`` ``MoE``."""
