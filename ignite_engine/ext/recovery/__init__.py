"""Fast recovery of a killed run: state in shared memory, and a parent process that restarts the ranks."""
