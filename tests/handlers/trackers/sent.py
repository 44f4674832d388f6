"""When the processes that send have ended."""

import json

from ignite_engine.checkpoint.lock import InUse, lock
from tests.kit.processes import wait_until


def settled(run):
    """Waits for the processes that send, which a run that was not completed leaves to themselves: what failed."""
    kept = [path.with_name(path.name.replace(".start.", ".")) for path in (run / "trackers").glob("*.start.json")]
    wait_until(lambda: all(path.exists() and not is_sending(path) for path in kept))
    found = {path.stem: json.loads(path.read_text()).get("problem") for path in kept}
    return {name: problem for name, problem in found.items() if problem}


def is_sending(kept):
    try:
        with lock(kept.with_suffix(".lock")):
            return False
    except InUse:
        return True
    except FileNotFoundError:
        return False
