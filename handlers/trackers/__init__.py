"""Trackers: each is sent what it lacks of a run's folder, by a process beside the training."""
