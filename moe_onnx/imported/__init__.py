"""Training graphs of models that come from elsewhere, such as exports of PyTorch."""
