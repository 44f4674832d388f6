"""Large tables: which row an id has, and an optimizer with one accumulator for each row."""

from ignite_engine.ext.sparse.ids import hash_ids
from ignite_engine.ext.sparse.rowwise_adagrad import RowwiseAdagrad

__all__ = ["RowwiseAdagrad", "hash_ids"]
