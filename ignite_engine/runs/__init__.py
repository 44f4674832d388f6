"""From a config and a task to a run."""
