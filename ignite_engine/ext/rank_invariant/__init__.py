"""The same bits on any number of ranks."""

from ignite_engine.ext.rank_invariant.strategy import RankInvariant

__all__ = ["RankInvariant"]
