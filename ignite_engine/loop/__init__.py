"""The loop of a Trainer: its bus, its progress, its step boundaries and the requests to stop or save."""
