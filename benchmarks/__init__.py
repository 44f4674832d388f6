"""Measurements of the engine against hand-written loops and Ignite's own engine; never imported by the package."""
