"""The text of a training program in plain torch: its head, the task, and the loop."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from ignite_engine.replay.eject_batches import batches_text
from ignite_engine.replay.eject_code import Code
from ignite_engine.replay.eject_main import main_text
from ignite_engine.replay.eject_plain import Plain, literal
from ignite_engine.replay.eject_rates import rate_names, rate_text


def text_of(plain: Plain) -> str:
    """The program."""
    parts = [_loop_constants(plain), *_definitions(plain), "\n".join(main_text(plain)), _CALL]
    loop = "\n\n\n".join(part for part in parts if part)
    code = "\n\n\n".join(part for part in (*(copied.text for copied in plain.copied), plain.task.text) if part)
    above = "# The task: what training needs of it, as it is written there.\n\n\n"
    return f"{_head(plain, loop)}{above}{code}\n\n\n# The run.\n\n{loop}\n"


_CALL = 'if __name__ == "__main__":\n    main()'


def definitions_of(code: Code) -> str:
    """The code of a task alone."""
    lines = ["from __future__ import annotations"] if code.has_future else []
    return "\n".join([*lines, *_imports_of(code, set()), code.text]) + "\n"


def _imports_of(code: Code, others: set[str]) -> list[str]:
    """All imports, and the names that stand for nothing."""
    lines = _import_lines(code.imports | others | ({"import sys"} if code.local else set()))
    if code.local:
        lines += ["", f"sys.path.insert(0, {literal(str(code.folder))})", *_import_lines(code.local)]
    if code.unused:
        lines += ["", f"{' = '.join(code.unused)} = None  # mentioned below, and not used by this run"]
    return lines


def _head(plain: Plain, loop: str) -> str:
    left_out = ", ".join(plain.left_out)
    lines = [f'"""{plain.title} in plain PyTorch, written by `ignite-engine eject`.', ""]
    lines += ["The last line printed is the SHA-256 of the weights, as `weights_sha256` in the run's summary.json."]
    lines += [f"Left out, as no weight depends on it: {left_out}."] if left_out else []
    lines += ['"""', ""]
    codes = [plain.task, *plain.copied]
    if any(code.has_future for code in codes):
        lines += ["from __future__ import annotations", ""]
    imports = {line for copied in plain.copied for line in copied.imports}
    imports |= {line for word, line in IMPORTS.items() if re.search(rf"\b{word}[.(]", loop)}
    lines += _imports_of(plain.task, imports)
    return "\n".join(lines) + "\n\n"


def _import_lines(imports: Iterable[str]) -> list[str]:
    """Imports of one name each as a program has them: the standard library's first, names of one module in a line."""
    modules, names = set[str](), dict[str, set[str]]()
    for line in imports:
        module, _, name = line.removeprefix("from ").partition(" import ")
        if name:
            names.setdefault(module, set()).add(name)
        else:
            modules.add(line)
    lines = sorted(modules) + [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in lines if line not in standard]
    return [*standard, *([""] if standard and others else []), *others]


IMPORTS = {
    "hashlib": "import hashlib",
    "itertools": "import itertools",
    "math": "import math",
    "np": "import numpy as np",
    "os": "import os",
    "random": "import random",
    "torch": "import torch",
    "default_collate": "from torch.utils.data import default_collate",
    "DataLoader": "from torch.utils.data import DataLoader",
    "TensorDataset": "from torch.utils.data import TensorDataset",
}
OWN_NAMES = frozenset(
    {*IMPORTS, "TASK_OPTIONS", "SEED", "ORDER_SEED", "ITERATIONS", "BATCH_SIZE", "ACCUMULATION_STEPS", "EPOCHS"}
    | {"mix", "seed_generators", "weights_sha256", "Epoch", "updates", "passes", "on_device", "unchanged", "main"}
)
"""What the loop defines."""


def _loop_constants(plain: Plain) -> str:
    lines = []
    if plain.options is not None:
        lines.append(f"TASK_OPTIONS = {literal(dict(plain.options), 103)}")
    lines.append(f"SEED = {plain.seed}")
    if plain.order_seed != plain.seed:
        lines.append(f"ORDER_SEED = {plain.order_seed}  # of the order of the samples, and of what each draws")
    if plain.iterations is not None:
        lines.append(f"ITERATIONS = {plain.iterations}")
    if plain.epochs is not None and plain.data == "windows":
        lines.append(f"EPOCHS = {plain.epochs}")
    lines.append(f"BATCH_SIZE = {plain.batch_size}")
    if plain.steps is not None:
        lines.append(f"ACCUMULATION_STEPS = {plain.steps}")
    return "\n".join(lines)


def _definitions(plain: Plain) -> list[str]:
    rates = [rate_text(name, rate) for rate, name in rate_names(plain).items()]
    return [*batches_text(plain), *rates, _SHA256]


_SHA256 = """def weights_sha256(model):
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\\0")
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()"""
