"""What a run has written while it trained, in the place of what would write it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing.digests import HASH
from ignite_engine.run_directory import json_values

_MEASURED = ("memory", "throughput", "time")
"""First words of the names of values that clocks and the machine decide."""


def is_measured(name: str) -> bool:
    """Whether clocks and the machine decide a value of that name."""
    return name.partition("/")[0] in _MEASURED


@dataclass(frozen=True)
class Difference:
    """A value that a run has logged and that is another one when it is replayed."""

    iteration: int
    what: str
    logged: Any
    replayed: Any

    def __str__(self) -> str:
        return f"At iteration {self.iteration} {self.what} is {self.replayed}, and the run has logged {self.logged}."


class Lines:
    """The lines of a JSONL file of a run by their iteration, each with its offset in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_iteration: dict[int, tuple[int, dict[str, Any]]] = {}
        start = 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    values = _values_of(line)
                    if values is not None:
                        self.by_iteration[values["iteration"]] = start, values
                    start += len(line)
        self.last = max(self.by_iteration, default=0)


def _values_of(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("iteration"), int) else None


class LoggedMetrics:
    """Compares values with the lines of ``metrics.jsonl``, and has the state of the sink that wrote them.

    Args:
        lines: of the run.
        note: called with each difference.

    What clocks and the machine decide is not compared.
    """

    def __init__(self, lines: Lines, note: Callable[[Difference], None]) -> None:
        self.lines, self._note = lines, note
        self.compared = 0
        """Lines, so far."""
        self.clocks = set[str]()
        """Names of values that stopwatches give."""
        self.means = set[str]()
        """Names of values that are averaged from one log point to the next."""
        self._at, self._written = 0, set[str]()

    def write(self, iteration: int, values: Mapping[str, Any], *, at_end: bool = False) -> None:
        """Compare what a sink would write; each value as JSON has it.

        Args:
            at_end: it is written after the last boundary, and a later start of the run has taken it back.
        """
        if iteration > self.lines.last:
            return
        if iteration != self._at:
            self._at, self._written = iteration, set()
            self.compared += 1
        _, logged = self.lines.by_iteration.get(iteration, (0, {}))
        for name, value in values.items():
            self._written.add(name)
            plain = json.loads(json.dumps(json_values(value)))
            if self._is_measured(name) or (at_end and name not in logged):
                continue
            if name not in logged or logged[name] != plain:
                self._note(Difference(iteration, name, logged.get(name, "nothing"), plain))
                return

    def state_dict(self) -> dict[str, Any]:
        start, logged = self.lines.by_iteration.get(self._at, (0, {}))
        written = {"iteration", *self._written}
        if self.means & written:  # what is measured is written with them
            written |= {name for name in logged if self._is_measured(name)}
        return {"start": start, "line": {name: value for name, value in logged.items() if name in written}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at, self._written = state["line"].get("iteration", 0), set(state["line"])

    def _is_measured(self, name: str) -> bool:
        return is_measured(name) or name in self.clocks


class LoggedTrail:
    """Compares digests with the lines of ``trail.jsonl``.

    Args:
        lines: of the run; what comes before the first or after the last, or is of another hash, is not compared.
        note: called with each difference.
    """

    def __init__(self, lines: Lines, note: Callable[[Difference], None]) -> None:
        self.lines, self._note = lines, note
        self.compared = 0
        """Lines, so far."""

    def write(self, iteration: int, digests: Mapping[str, Any]) -> None:
        """Compare what the handler would write."""
        known = self.lines.by_iteration
        if not known or not min(known) <= iteration <= self.lines.last:
            return
        _, logged = known.get(iteration, (0, {}))
        if logged.get("hash", HASH) != HASH:
            return
        self.compared += 1
        of_logged = logged.get("weights", {})
        for name, digest in digests["weights"].items():
            if of_logged.get(name) != digest:
                what = f"the digest of {name}"
                self._note(Difference(iteration, what, of_logged.get(name, "nothing"), digest))
                return
        if logged.get("all") != digests["all"]:
            self._note(Difference(iteration, "the digest of all weights", logged.get("all"), digests["all"]))


class Kept:
    """The state of a sink that is off: as it was loaded, or as it was built."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state
