"""Any moment of a run again, from its checkpoints and its config; and what follows from that."""
