"""Beginning with parts of another checkpoint: the plan, what it selects, and the table of what was loaded."""
