"""How the gradients of a group are accumulated: one strategy for each kind of model.

A strategy is called once with the micro-batches of an iteration and their scales. It leaves the sum of the scaled
gradients in ``parameter.grad`` and returns the weighted means of what was reported.
"""

from ignite_engine.step.accumulate.forward_backward import Accumulate, ForwardBackward
from ignite_engine.step.accumulate.plain import Plain
from ignite_engine.step.accumulate.with_peers import WithPeers

__all__ = ["Accumulate", "ForwardBackward", "Plain", "WithPeers"]
