"""Mistakes planted in the device code, one at a time, in a copy of the repository; the tests of devices must fail.

Usage: ``python -m tests.device.planted [--only 3,7] [--markdown]``. It exits with 1 if more than two are not found.
Each runs the tests of ``python -m tests.device`` on the fake devices, one kind after the other, until one fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.device.__main__ import files_of, markers_of
from tests.device.fake import KINDS, VARIABLE
from tests.mutations.tree import ROOT, Result, Tree

ALLOWED = 2
"""Mistakes that may stay unseen."""
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Mistake:
    """Texts of a file that are replaced; each occurs in it once."""

    what: str
    path: str
    replaced: tuple[tuple[str, str], ...]

    def applied(self, text: str) -> str:
        """The file with the mistake in it.

        Raises:
            ValueError: the file has changed, so that the mistake must be written anew.
        """
        for old, new in self.replaced:
            if text.count(old) != 1:
                raise ValueError(
                    f"{self.what}: {self.path} must contain {old!r} once, it does {text.count(old)} times."
                )
            text = text.replace(old, new)
        return text


_MOVES, _SNAPSHOT = "ignite_engine/step/device.py", "ignite_engine/checkpointing/snapshot.py"

MISTAKES = (
    Mistake(
        "computing does not wait for the copy of a batch",
        _MOVES,
        (("        self._computing.wait_stream(self._side)\n", ""),),
    ),
    Mistake(
        "the stream that copies batches waits, not the one that computes",
        _MOVES,
        (("self._computing.wait_stream(self._side)", "self._side.wait_stream(self._computing)"),),
    ),
    Mistake(
        "a batch's memory is given to the next copy while it is computed with",
        _MOVES,
        (("            tensor.record_stream(self._computing)  #", "            pass  #"),),
    ),
    Mistake(
        "what moves itself is moved on the side stream",
        _MOVES,
        (
            (
                "        with self._computing:\n            return super()._object(value)",
                "        return super()._object(value)",
            ),
        ),
    ),
    Mistake(
        "a batch is moved without waiting where nothing orders the copy",
        _MOVES,
        (("    _non_blocking = False  #", "    _non_blocking = True  #"),),
    ),
    Mistake(
        "a snapshot does not wait for what is being computed",
        _SNAPSHOT,
        (("            stream.wait_stream(devices.current_stream(device))\n", ""),),
    ),
    Mistake(
        "the step waits for a snapshot on the current device's stream, not on the model's",
        _SNAPSHOT,
        (
            (
                "devices.current_stream(event.device).wait_event(event)",
                "torch.accelerator.current_stream().wait_event(event)",
            ),
        ),
    ),
    Mistake(
        "a snapshot is written before its copies have ended",
        _SNAPSHOT,
        (("            event.synchronize()", "            event.query()"),),
    ),
    Mistake(
        "the event of a snapshot is recorded before its copies",
        _SNAPSHOT,
        (
            ("                self._copied.append(stream.record_event())\n", ""),
            (
                "            with stream:\n                for",
                "            with stream:\n                self._copied.append(stream.record_event())\n"
                "                for",
            ),
        ),
    ),
    Mistake(
        "a snapshot's pinned buffers are used again while they are written to disk",
        "handlers/checkpoint/handler.py",
        (
            (
                "                return\n            saver.finish(trainer)\n",
                "                return\n            saver._before_change(trainer)\n",
            ),
        ),
    ),
    Mistake(
        "weights are copied without waiting on a device without side streams",
        _SNAPSHOT,
        (
            (
                "buffer.copy_(source, non_blocking=self._stream_of(source) is not None)",
                "buffer.copy_(source, non_blocking=True)",
            ),
        ),
    ),
    Mistake(
        "clipping reads the norm",
        "ignite_engine/step/gradients.py",
        (('if norm.device.type == "cpu" and _is_below(', "if _is_below("),),
    ),
    Mistake(
        "the loop reads the loss",
        "ignite_engine/engine/loop.py",
        (
            (
                "                progress.group_consumed()\n",
                "                progress.group_consumed()\n"
                '                if isinstance(state.output, dict) and state.output["loss"].item() > 1e30:\n'
                "                    engine.should_terminate = True\n",
            ),
        ),
    ),
    Mistake(
        "the log copies numbers to the device between two log points",
        "handlers/meters.py",
        (("            if last - first + 1 == len(chunk):", "            if False:"),),
    ),
    Mistake(
        "the device's generators are not saved",
        "ignite_engine/rng.py",
        (("    state |= of_devices", ""),),
    ),
    Mistake(
        "of several devices the current one's generator is saved",
        "ignite_engine/devices.py",
        (("return {kind: module.get_rng_state_all()}", "return {kind: [module.get_rng_state()]}"),),
    ),
    Mistake(
        "an evaluation moves the device's generators",
        "ignite_engine/rng.py",
        (("    if of_devices:", "    if False:"),),
    ),
    Mistake(
        "a step that is done again after out of memory draws other numbers on the device",
        "ignite_engine/step/out_of_memory.py",
        (("        if self._of_device is not None:", "        if False:"),),
    ),
    Mistake(
        "the clock's events are recorded on the current device, not the model's",
        "handlers/step_times/clocks.py",
        (("event.record(devices.current_stream(self._device))", "event.record()"),),
    ),
    Mistake(
        "a model that is on a device is moved to the current one",
        "ignite_engine/runs/wrapping.py",
        (("""    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):""", "    if False:"),),
    ),
)


def found(tree: Tree, mistake: Mistake) -> tuple[str, Result]:
    """The kind of device, and what its tests gave: those of the first that sees the mistake, else of the last."""
    text = (ROOT / mistake.path).read_text(encoding="utf-8")
    with tree.changed(mistake.path, mistake.applied(text)):
        for kind in KINDS:
            markers = markers_of(kind)
            files = sorted(files_of(markers), key=lambda file: "test_training" not in file)  # which sees most
            arguments = ["-m", " or ".join(markers), *files]
            result = tree.test(arguments, timeout_s=_TIMEOUT_S, variables={VARIABLE: kind})
            if result.caught_by is not None:
                break
    return kind, result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device.planted")
    parser.add_argument("--only", default="", help="numbers of mistakes, such as 3,7")
    parser.add_argument("--markdown", action="store_true", help="print the rows of the table of docs/devices.md")
    options = parser.parse_args(arguments)
    chosen = [int(number) for number in options.only.split(",") if number] or range(1, len(MISTAKES) + 1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder) / "tree")
        for number in chosen:
            mistake = MISTAKES[number - 1]
            kind, result = found(tree, mistake)
            missed += result.caught_by is None
            test = "**not found**" if result.caught_by is None else f"`{result.caught_by}`"
            row = f"| {number} | {mistake.what} | {test} | {kind if result.caught_by else 'all'} |"
            print(
                row if options.markdown else f"{row} {result.how}, {result.seconds:.0f} s: {result.last_line}",
                flush=True,
            )
    print(f"{len(chosen)} mistakes, {len(chosen) - missed} found.")
    return int(missed > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
