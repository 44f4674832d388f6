"""Loaders that resume, the order of their samples, and the source that a Trainer iterates."""
