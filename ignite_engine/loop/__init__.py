"""How a Trainer runs: the bus, the loop, its progress and what it is asked to do."""
