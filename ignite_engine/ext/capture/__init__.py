"""An update as graphs of ``torch.compile``: gradients of a micro-batch, clip and step; on one process."""

from ignite_engine.ext.capture.capture import Capture

__all__ = ["Capture"]
