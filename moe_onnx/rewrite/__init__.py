"""ModelProto -> ModelProto."""
