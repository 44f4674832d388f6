"""Rooms that the core does not know: each can be deleted."""
