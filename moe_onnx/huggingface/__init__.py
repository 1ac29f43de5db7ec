"""Checkpoints of Hugging Face: read, trained, and written back, without torch and transformers."""
