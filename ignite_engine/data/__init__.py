"""Batches that resume: loaders, their order, and the source that a Trainer iterates."""
