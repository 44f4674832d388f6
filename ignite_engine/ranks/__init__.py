"""Several processes: what they decide together, how they are launched, and what DDP shares."""
