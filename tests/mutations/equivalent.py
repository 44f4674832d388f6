"""Drawn mutations that change no behaviour, each with the reason; another one is drawn instead."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "ignite_engine/states/repeated_event.py arguments: torch.equal(first, second) -> (torch.equal(second, first)) "
    "in return alike and torch.equal(first, second)": "Whether two tensors are equal does not depend on their order.",
    "ignite_engine/capture/gradients.py arguments: torch.allclose(tensor, value, rtol=0.0, atol=0.0, equal_nan=True) "
    "-> (torch.allclose(value, tensor, rtol=0.0, atol=0.0, equal_nan=True)) in if not torch.allclose(tensor, value, "
    "rtol=0.0, atol=0.0, equal_nan=True):": "Without a tolerance the order of the two does not count.",
    'ignite_engine/data/fingerprint.py constant: 1 -> 2 in yield f"{value.shape}".encode() + '
    "np.asarray(value).reshape(-1)[:_ELEMENTS].tobytes()": "NumPy takes each negative size for the unknown one.",
}
