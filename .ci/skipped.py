"""Print the skipped tests and exit 1 if one of them is not on the list with the reason that the list gives.

Usage: ``python3 .ci/skipped.py SKIPPED ALLOWED``. SKIPPED is what ``pytest --skipped-to`` wrote: a JSON object per line
with ``test`` and ``reason``. ALLOWED has one ``test pattern | reason`` per line; ``*`` matches anything in both.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def matches(pattern: str, text: str) -> bool:
    """True if ``text`` matches ``pattern``, where ``*`` is any text; unlike in fnmatch, brackets are literal."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None


def read_allowed(path: Path) -> list[tuple[str, str]]:
    """The (test pattern, reason pattern) pairs of the list.

    Raises:
        ValueError: a line without a reason.
    """
    allowed = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, separator, reason = (part.strip() for part in line.partition("|"))
        if not (pattern and separator and reason):
            raise ValueError(f"{path}:{number}: expected `test pattern | reason`, got {line!r}.")
        allowed.append((pattern, reason))
    return allowed


def main(skipped_file: str, allowed_file: str) -> int:
    if not Path(skipped_file).is_file() or not Path(skipped_file).read_text().strip():
        print("Skipped tests: the report is missing, because the test run did not finish.")
        return 1
    lines = [json.loads(line) for line in Path(skipped_file).read_text().splitlines()]
    skipped = [(line["test"], line["reason"]) for line in lines if "test" in line]
    allowed = read_allowed(Path(allowed_file))
    print(f"Skipped tests: {len(skipped)}")
    refused = 0
    for test, reason in skipped:
        listed = any(matches(pattern, test) and matches(why, reason) for pattern, why in allowed)
        refused += not listed
        print(f"  {'allowed    ' if listed else 'NOT ALLOWED'} {test}: {reason}")
    if refused:
        print(f"{refused} skipped for a reason that is not in {allowed_file}: fix the test or add it there.")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
