"""What a checkpoint holds: every object with a state, by name."""
