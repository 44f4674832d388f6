"""The parts of one optimizer step."""
