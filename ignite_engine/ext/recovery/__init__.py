"""What a killed run goes on from within moments: state in shared memory, and a parent that starts its ranks again."""
