"""The proof of a resume: what a run records at each step, and where two runs first differ."""
