"""Several processes: what they decide together, how they are launched, and what DDP shares."""

from ignite_engine.ranks.mesh import data_rank, data_size, use_mesh

__all__ = ["data_rank", "data_size", "use_mesh"]
