"""What to load from a checkpoint, and what may differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ignite_engine.checkpointing.load.patterns import Patterns


@dataclass(frozen=True)
class LoadPlan:
    """What to load, and what may differ.

    Args:
        parts: which parts: names of parts, patterns, or the words ``model``, ``optimizer``, ``schedule``, ``scaler``,
            ``data``, ``counters``, ``rng`` and ``handlers`` (all others); None: all of them.
        include: of a part that is named here, only these names: ``["model:backbone.*"]``.
        ignore: parts and names that stay as they were built, wherever they are missing: ``["model:head.*", "ema"]``.
        rename: from names in the checkpoint to names here, in the model, its optimizers and its averages. A key is
            the prefix of a name, ``{"encoder.": "backbone."}``, a whole name with ``*`` for any text, which the new
            name repeats, ``{"layers.*.attn.*": "blocks.*.attention.*"}``, or after ``re:`` a regular expression; of
            several that match a name the first one applies. All patterns refer to the names after it.
        weights: ``raw``, or the part that holds an average (``ema``), which is then loaded as the model.
        strict: what is missing on either side, or of another shape, is an error; otherwise it stays as it was built
            and is listed in the table.

    An optimizer's options (its learning rate, its betas) come along with the counters only, and with all of its
    parameters: a run that starts counting from 0 keeps its own.

    Raises:
        ValueError: a pattern or a rename is malformed; ``data`` without ``counters``.
    """

    parts: Sequence[str] | None = None
    include: Sequence[str] = ()
    ignore: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    weights: str = "raw"
    strict: bool = True

    def __post_init__(self) -> None:
        Patterns(self.include, "include")
        Patterns(self.ignore, "ignore")
        if self.parts is not None:
            Patterns(self.parts, "parts")
            if inside := next((text for text in self.parts if ":" in text), None):
                raise ValueError(f"parts names whole parts, got {inside!r}: give names inside a part to include.")
            if "data" in self.parts and not {"counters", "trainer"} & set(self.parts):
                raise ValueError(
                    "parts has 'data' without 'counters': a run that counts from 0 starts its data from the beginning."
                )
        for old, new in self.rename.items():
            renaming(old, new)

    @classmethod
    def resume(cls, **changes: Any) -> LoadPlan:
        """Everything: continue the run that was saved."""
        return cls(**changes)

    @classmethod
    def fine_tune(cls, **changes: Any) -> LoadPlan:
        """Only the model; optimizer, counters, data and random numbers start fresh."""
        return cls(**{"parts": ("model",), **changes})

    @classmethod
    def warm_start(cls, **changes: Any) -> LoadPlan:
        """The model and the optimizers' state; counters, schedule, data and random numbers start fresh."""
        return cls(**{"parts": ("model", "optimizer"), **changes})


def renaming(old: str, new: str) -> Callable[[str], str | None]:
    """The function of one rule of ``rename``: the new name, or None where the rule does not match.

    Raises:
        ValueError: the rule is malformed.
    """
    if old.startswith("re:"):
        try:
            expression = re.compile(old[3:])
        except re.error as error:
            raise ValueError(f"rename has {old!r}, which is not a regular expression: {error}.") from None
        return lambda name: expression.sub(new, name) if expression.search(name) else None
    if "*" not in old:
        return lambda name: new + name[len(old) :] if name.startswith(old) else None
    if new.count("*") != old.count("*"):
        raise ValueError(f"rename has {{{old!r}: {new!r}}}: expected as many * in the new name as in the old one.")
    whole = re.compile("(.*?)".join(map(re.escape, old.split("*"))))
    pieces = new.split("*")

    def renamed(name: str) -> str | None:
        match = whole.fullmatch(name)
        return pieces[0] + "".join(map("".join, zip(match.groups(), pieces[1:], strict=True))) if match else None

    return renamed
