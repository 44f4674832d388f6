"""Large tables: which row an id has, and an optimizer with one accumulator for each row."""
