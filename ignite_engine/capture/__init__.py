"""An update as graphs of ``torch.compile``: gradients of a micro-batch, clip and step."""

from ignite_engine.capture.capture import CAPTURE_MODES, Capture, NotCaptured

__all__ = ["CAPTURE_MODES", "Capture", "NotCaptured"]
