"""Data that arrives in windows, each of which is a pass."""

from ignite_engine.ext.windows.windowed_source import WindowedSource
from ignite_engine.ext.windows.windows import Files, Windows, WindowStream

__all__ = ["Files", "WindowStream", "WindowedSource", "Windows"]
