"""Training graphs from a config: forward, losses, backward, optimizer, manifest."""
