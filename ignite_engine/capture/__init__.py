"""An update as graphs of ``torch.compile``: gradients of a micro-batch, clip and step."""

from ignite_engine.capture.capture import CAPTURE_MODES, Capture, NotCaptured
from ignite_engine.capture.compiling import keep_compiled_code_in

__all__ = ["CAPTURE_MODES", "Capture", "NotCaptured", "keep_compiled_code_in"]
