"""What a graph costs before it runs: parameters, operations, bytes, memory; and how it is laid out."""
