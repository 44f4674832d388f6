"""A config and a task become a run."""
