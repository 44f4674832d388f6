"""Several processes: joint decisions, their launch, their supervision, and DDP."""

from ignite_engine.ranks.mesh import data_rank, data_size, use_mesh

__all__ = ["data_rank", "data_size", "use_mesh"]
