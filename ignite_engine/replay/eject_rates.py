"""Learning rates of an ejected program: a schedule of a config as a function of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite_engine.replay.eject_plain import Plain, Rate


def rate_names(plain: Plain) -> dict[Rate, str]:
    """The name of the function of each of the different rates."""
    rates = list(dict.fromkeys(optimizing.rate for optimizing in plain.optimizers if optimizing.rate is not None))
    return {rate: "rate" if len(rates) == 1 else f"rate_{number}" for number, rate in enumerate(rates, start=1)}


def rate_text(name: str, rate: Rate) -> str:
    return "\n".join([f"def {name}(update):", f'    """{rate.description}"""', *(f"    {line}" for line in rate.lines)])


def rate_of(name: str, options: Mapping[str, Any], warmup: int, total: int) -> Rate | None:
    """The code of a schedule of a config; None: the rate is that of the optimizer throughout.

    Args:
        name: as ``schedule.name``.
        options: ``min_ratio``, ``power``, ``decay`` in updates, ``decay_shape``, as far as they are given.
        warmup: updates.
        total: updates.
    """
    floor, start = float(options.get("min_ratio") or 0.0), warmup
    shapes = {
        "linear": "1.0 - progress",
        "cosine": "0.5 * (1.0 + math.cos(math.pi * progress))",
        "polynomial": f"(1.0 - progress) ** {float(options.get('power') or 2.0)!r}",
        "1-sqrt": "1.0 - math.sqrt(progress)",
        "exponential": f"{floor!r} ** progress",
    }
    lines = [f"if update < {warmup}:", f"    return (update + 1) / {warmup}"] if warmup else []
    text = f"a warm-up of {warmup} updates, then " if warmup else ""
    if name == "constant":
        return Rate(f"The rate over the optimizer's: {text}1.", (*lines, "return 1.0")) if warmup else None
    if name == "inverse_sqrt":
        value = f"math.sqrt({max(warmup, 1)} / (min(update, {total}) + 1))"
        lines += [f"return max({floor!r}, {value})" if floor else f"return {value}"]
        return Rate(f"The rate over the optimizer's: {text}one over the square root of the updates.", tuple(lines))
    shape = name
    if name == "wsd":
        shape, start = str(options.get("decay_shape") or "linear"), total - int(options["decay"])
        lines += [f"if update <= {start}:", "    return 1.0"]
        text += f"1 up to update {start}, then "
    length = total - start
    since = f"(update - {start})" if start else "update"
    lines += [f"progress = min({since} / {length}, 1.0)" if length else "progress = 1.0"]
    value = shapes[shape]
    if floor and shape != "exponential":
        value = f"{floor!r} + (1.0 - {floor!r}) * ({value})"
    kinds = {"linear": "a straight line", "cosine": "half a cosine", "polynomial": "a polynomial", "1-sqrt": "1 - sqrt"}
    text += f"{kinds.get(shape, 'an exponential')} to {floor:g}"
    return Rate(f"The rate over the optimizer's: {text}.", (*lines, f"return {value}"))


def whole(value: float, total: int) -> int:
    """Updates of a duration that is a number of them or a fraction of ``total``, as ``schedules`` rounds it."""
    return round(value * total) if isinstance(value, float) else value
