"""Sessions, feeds and what onnxruntime needs of them."""
