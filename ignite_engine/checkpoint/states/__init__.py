"""The states that a checkpoint holds, by name."""
