"""Large embedding tables: a hash from ids to rows, and an optimizer with one accumulator per row."""

from ignite_engine.ext.sparse.ids import hash_ids
from ignite_engine.ext.sparse.rowwise_adagrad import RowwiseAdagrad

__all__ = ["RowwiseAdagrad", "hash_ids"]
