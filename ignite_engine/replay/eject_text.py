"""The text of a training program in plain torch, with the branches that one run needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ignite_engine.replay.eject_code import Code

LOG_EVERY = 50
"""Updates from one printed loss to the next, where the run does not count them."""
_WIDTH = 118


@dataclass(frozen=True)
class Rate:
    """The learning rate over the rate of the optimizer, as code."""

    description: str
    lines: tuple[str, ...]
    """The body of a function of ``update``, which counts from 0."""


@dataclass(frozen=True)
class Optimizing:
    """An optimizer of the run, as code."""

    made: str | None
    """The call that makes it; None: the task does."""
    rate: Rate | None
    """None: it stays as it is."""


@dataclass(frozen=True)
class Plain:
    """What a program in plain torch is to do."""

    title: str
    task: Code
    parts: str
    """The call that makes the parts of the run."""
    is_weighed: bool
    """``weight_fn`` is among the parts."""
    options: Mapping[str, Any] | None
    seed: int
    order_seed: int
    model_is_made_first: bool
    """The generators are seeded for the making of the model, too."""
    iterations: int | None
    """None: until the windows end."""
    epochs: int | None
    per_epoch: int | None
    batch_size: int
    drop_last: bool
    shuffle: bool
    workers: int
    data: Literal["samples", "tensors", "loader", "windows"]
    reads_batches: bool
    steps: int | None
    collate: str | None
    """What makes a batch of samples; None: torch's own."""
    losses: Literal["one", "mapping", "tuple"]
    has_extras: bool
    """The loss function returns a pair, of which the second is only reported."""
    optimizers: Sequence[Optimizing]
    own_optimizer: str | None
    """The expression of what the task makes; None: they are made from the config."""
    has_several: bool
    scheduler_steps: Literal["step", "epoch"] | None
    clip_norm: float | None
    trains_all: bool
    """Of the model's parameters the optimizers hold each that has a gradient."""
    precision: Literal["fp32", "bf16", "fp16"]
    scaler: Mapping[str, Any]
    device: str
    deterministic: bool
    matmul_precision: str
    threads: int | None
    log_every: int
    left_out: Sequence[str] = ()
    copied: Sequence[Code] = ()


def text_of(plain: Plain) -> str:
    """The program."""
    parts = [_loop_constants(plain), *_definitions(plain), "\n".join(_main(plain)), _CALL]
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
    imports |= {line for word, line in IMPORTS.items() if f"{word}." in loop or f"{word}(" in loop}
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


def literal(value: Any, width: int = _WIDTH) -> str:
    """Plain nested values as code, in several lines where one is longer than ``width``."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list | tuple):
        return repr(value)
    elements = [literal(element, width - 4) for element in value]
    if isinstance(value, dict):
        elements = [
            f"{key}: {literal(element, width - 4)}" for key, element in zip(elements, value.values(), strict=True)
        ]
    left, right = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}[type(value)]
    line = ", ".join(elements) + ("," if isinstance(value, tuple) and len(elements) == 1 else "")
    if len(line) + 2 <= width and "\n" not in line:
        return f"{left}{line}{right}"
    inner = ",\n".join(elements).replace("\n", "\n    ")
    return f"{left}\n    {inner},\n{right}"


IMPORTS = {
    "hashlib": "import hashlib",
    "itertools": "import itertools",
    "math": "import math",
    "np": "import numpy as np",
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
        lines.append(f"TASK_OPTIONS = {literal(dict(plain.options), _WIDTH - 15)}")
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
    parts = [_MIX, _SEED, _SHA256, _epoch(plain)]
    if plain.data == "windows":
        parts.append(_windows(plain))
    parts.append(_updates(plain))
    parts += [_rate(name, rate) for rate, name in rate_names(plain).items()]
    if plain.device != "cpu":
        parts.append(_ON_DEVICE.replace("{device}", plain.device))
    if plain.workers:
        parts.append("def unchanged(batch):\n    return batch")
    return parts


_MIX = '''def mix(*numbers):
    """A seed from several numbers: the SplitMix64 finaliser, Steele, Lea and Flood 2014."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        value ^= value >> 31
    return value'''

_SEED = """def seed_generators(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)"""

_SHA256 = """def weights_sha256(model):
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\\0")
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()"""

_ON_DEVICE = """def on_device(value):
    if isinstance(value, dict):
        return {key: on_device(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        elements = [on_device(element) for element in value]
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    return value.to("{device}") if isinstance(value, torch.Tensor) else value"""


def _epoch(plain: Plain) -> str:
    seed = "SEED" if plain.order_seed == plain.seed else "ORDER_SEED"
    collate = "self.collate_fn" if plain.collate else "default_collate"
    lines = ["class Epoch:"]
    order = "Batches of an epoch, in an order by (seed, epoch)" if plain.shuffle else "Batches of an epoch"
    lines += [f'    """{order}; what a sample draws is by (seed, epoch, index)."""', ""]
    own = ", collate_fn" if plain.collate else ""
    lines += [f"    def __init__(self, data, number{own}):"]
    names = f"self.data, self.number{own.replace(' ', ' self.')}"
    lines += [f"        {names} = data, number{own}"]
    if plain.shuffle:
        lines += [
            f"        generator = torch.Generator().manual_seed(mix({seed}, number) >> 1)",
            "        self.order = torch.randperm(len(data), generator=generator).tolist()",
        ]
    else:
        lines += ["        self.order = range(len(data))"]
    count = "len(self.order) // BATCH_SIZE" if plain.drop_last else "math.ceil(len(self.order) / BATCH_SIZE)"
    lines += ["", "    def __len__(self):", f"        return {count}", ""]
    lines += [
        "    def __getitem__(self, number):",
        "        indices = list(self.order[number * BATCH_SIZE : (number + 1) * BATCH_SIZE])",
        "        before = random.getstate(), np.random.get_state(), torch.get_rng_state()",
    ]
    if plain.reads_batches:
        lines += [
            f"        seed_generators(mix({seed}, self.number, indices[0]))",
            "        samples = self.data.__getitems__([*indices])",
        ]
    else:
        lines += [
            "        samples = []",
            "        for index in indices:",
            f"            seed_generators(mix({seed}, self.number, index))",
            "            samples.append(self.data[index])",
        ]
    lines += [
        f"        seed_generators(mix({seed}, self.number, indices[0], 1))",
        f"        batch = {collate}(samples)",
        "        random.setstate(before[0])",
        "        np.random.set_state(before[1])",
        "        torch.set_rng_state(before[2])",
        "        return batch",
    ]
    return "\n".join(lines)


def _windows(plain: Plain) -> str:
    names = "itertools.cycle(windows.stream)"
    if plain.epochs is not None:
        names = "itertools.chain.from_iterable(itertools.repeat(windows.stream, EPOCHS))"
    own = ", collate_fn" if plain.collate else ""
    return "\n".join(
        [
            f"def passes(windows{own}):",
            '    """Each window is a pass, with an order of its own; an empty one is left out."""',
            f"    for number, name in enumerate({names}):",
            "        data = windows.open(name)",
            "        if data is not None and len(data):",
            f"            yield Epoch(data, number{own})",
        ]
    )


def _updates(plain: Plain) -> str:
    own = ", collate_fn" if plain.collate else ""
    of_one = "the micro-batches of each update" if plain.steps else "the batches"
    lines = [f"def updates(data{own}):", f'    """{of_one.capitalize()}, epoch after epoch."""']
    if plain.data == "windows":
        lines += [f"    for epoch in passes(data{own}):"]
    else:
        lines += ["    for number in itertools.count():", f"        epoch = Epoch(data, number{own})"]
    batches = "map(epoch.__getitem__, range(len(epoch)))"
    if plain.workers:
        options = f"batch_size=None, collate_fn=unchanged, num_workers={plain.workers}, generator=torch.Generator()"
        batches = f"DataLoader(epoch, {options})"
    if plain.steps:
        lines += [
            f"        batches = iter({batches})" if plain.workers else f"        batches = {batches}",
            "        while group := list(itertools.islice(batches, ACCUMULATION_STEPS)):",
            "            yield group",
        ]
    else:
        lines += [f"        yield from {batches}"]
    return "\n".join(lines)


def rate_names(plain: Plain) -> dict[Rate, str]:
    """The name of the function of each of the different rates."""
    rates = list(dict.fromkeys(optimizing.rate for optimizing in plain.optimizers if optimizing.rate is not None))
    return {rate: "rate" if len(rates) == 1 else f"rate_{number}" for number, rate in enumerate(rates, start=1)}


def _rate(name: str, rate: Rate) -> str:
    return "\n".join([f"def {name}(update):", f'    """{rate.description}"""', *(f"    {line}" for line in rate.lines)])


def _main(plain: Plain) -> list[str]:
    lines = ["def main():"]
    lines += [f"    {line}" for line in _set_up(plain)]
    lines += [f"    {line}" for line in _make_optimizers(plain)]
    lines += [f"    data = {data_of(plain)}"]
    batches = f"updates(data{f', {plain.collate}' if plain.collate else ''})"
    if plain.iterations is not None:
        batches = f"itertools.islice({batches}, ITERATIONS)"
    lines += [f"    for iteration, {'group' if plain.steps else 'batch'} in enumerate({batches}):"]
    lines += [f"        {line}" for line in _step(plain)]
    lines += [
        f"        if (iteration + 1) % {plain.log_every} == 0:",
        '            print(f"iteration {iteration + 1}, loss {torch.stack(logged).mean().item():.6g}", flush=True)',
        "            logged.clear()",
        "    print(weights_sha256(model))",
    ]
    return lines


def data_of(plain: Plain) -> str:
    """The expression of the samples of the training set, or of its windows."""
    if plain.data == "tensors":
        return 'TensorDataset(*map(torch.as_tensor, parts["train_set"]))'
    return 'parts["train_set"].dataset' if plain.data == "loader" else 'parts["train_set"]'


def _set_up(plain: Plain) -> list[str]:
    lines = []
    if plain.matmul_precision != "highest":
        lines += [f'torch.set_float32_matmul_precision("{plain.matmul_precision}")']
    if plain.device != "cpu":
        lines += [f"torch.backends.cudnn.allow_tf32 = {plain.matmul_precision != 'highest'}"]
    if plain.threads is not None:
        lines += [f"torch.set_num_threads({plain.threads})"]
    if plain.deterministic:
        lines += ["torch.use_deterministic_algorithms(True)"]
    seed = ["seed_generators(SEED)"]
    if plain.device != "cpu":
        seed += ["torch.manual_seed(SEED)  # also that of the device"]
    if plain.model_is_made_first:
        lines += seed
    lines += [f"parts = {plain.parts}"]
    place = f'.to("{plain.device}")' if plain.device != "cpu" else ""
    lines += [f'model, loss_fn = parts["model"]{place}.train(), parts["loss_fn"]']
    seed[0] += "  # dropout does not depend on what the model has drawn"
    return lines + seed


def _make_optimizers(plain: Plain) -> list[str]:
    lines = []
    if (made := plain.own_optimizer) is not None:
        lines += [f"optimizers = list({made}.values())" if plain.has_several else f"optimizer = {made}"]
    elif plain.has_several:
        lines += ["optimizers = ["]
        lines += [f"    {optimizing.made}," for optimizing in plain.optimizers]
        lines += ["]"]
    else:
        lines += [f"optimizer = {plain.optimizers[0].made}"]
    if plain.clip_norm is not None and not plain.trains_all:
        lines += [
            "groups = [group for optimizer in optimizers for group in optimizer.param_groups]"
            if plain.has_several
            else "groups = optimizer.param_groups",
            'trained = {parameter for group in groups for parameter in group["params"]}',
            "parameters = [parameter for parameter in model.parameters() if parameter in trained]",
        ]
    functions = rate_names(plain)
    if functions:
        lines += ["scheduled = ["] if plain.has_several else []
        for number, optimizing in enumerate(plain.optimizers):
            if optimizing.rate is None:
                continue
            name, each = functions[optimizing.rate], f"optimizers[{number}]"
            if plain.has_several:
                lines += [f'    *((group, group["lr"], {name}) for group in {each}.param_groups),']
            else:
                lines += ['base_rates = [group["lr"] for group in optimizer.param_groups]']
        lines += ["]"] if plain.has_several else []
    if plain.scheduler_steps is not None:
        lines += [
            'schedulers = [parts["schedule"](optimizer) for optimizer in optimizers]'
            if plain.has_several
            else 'scheduler = parts["schedule"](optimizer)'
        ]
    if plain.precision == "fp16":
        options = "".join(f", {key}={literal(value)}" for key, value in plain.scaler.items())
        lines += [f'scaler = torch.amp.GradScaler("{plain.device}"{options})']
    if _counts_steps(plain):
        lines += ["steps = 0"]
    return [*lines, "logged = []"]


def _counts_steps(plain: Plain) -> bool:
    """An update may be left out, and the rates follow those that are made."""
    is_scheduled = bool(rate_names(plain)) or plain.scheduler_steps is not None
    return is_scheduled and (plain.precision == "fp16" or plain.is_weighed)


def _step(plain: Plain) -> list[str]:
    lines = []
    is_weighed, grouped = plain.is_weighed, plain.steps is not None
    if is_weighed:
        group = "group" if grouped else "[batch]"
        lines += [
            f'weights = [float(parts["weight_fn"](batch)) for batch in {group}]',
            "if not sum(weights):",
            "    continue",
        ]
    update = "steps" if _counts_steps(plain) else "iteration"
    for name in rate_names(plain).values():
        if plain.has_several:
            lines += ["for group_, base, rate_of in scheduled:", f'    group_["lr"] = base * rate_of({update})']
            break
        lines += [
            "for parameter_group, base_rate in zip(optimizer.param_groups, base_rates):",
            f'    parameter_group["lr"] = base_rate * {name}({update})',
        ]
    if is_weighed:
        lines += [f"for batch, weight in zip({group}, weights):", "    if not weight:", "        continue"]
        lines += [f"    {line}" for line in _forward_backward(plain, "weight / sum(weights)")]
    elif grouped:
        lines += ["for batch in group:"]
        lines += [f"    {line}" for line in _forward_backward(plain, "1 / len(group)")]
    else:
        lines += _forward_backward(plain, None)
    return lines + _optimize(plain)


def _forward_backward(plain: Plain, scale: str | None) -> list[str]:
    batch = "on_device(batch)" if plain.device != "cpu" else "batch"
    call, loss = f"loss_fn(model, {batch})", "loss" if plain.losses == "one" else "losses"
    forward = f"{loss}, _ = {call}" if plain.has_extras else f"{loss} = {call}"
    lines = [forward]
    if plain.precision != "fp32":
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[plain.precision]
        lines = [f'with torch.autocast("{plain.device}", dtype={dtype}):', f"    {forward}"]
    if plain.losses != "one":
        lines += [f"loss = sum({'losses.values()' if plain.losses == 'mapping' else 'losses'})"]
    lines += ["logged.append(loss.detach())"]
    scaled = "loss" if scale is None else f"loss * ({scale})"
    if plain.precision == "fp16":
        return [*lines, f"scaler.scale({scaled}).backward()"]
    return [*lines, "loss.backward()" if scale is None else f"({scaled}).backward()"]


def _optimize(plain: Plain) -> list[str]:
    lines: list[str] = []
    if plain.precision == "fp16":
        lines += ["scaler.unscale_(optimizer)"]
    if plain.clip_norm is not None:
        parameters = "model.parameters()" if plain.trains_all else "parameters"
        lines += [f"torch.nn.utils.clip_grad_norm_({parameters}, {plain.clip_norm!r})"]
    stepped = ["steps += 1"] if _counts_steps(plain) else []
    follow = ["for scheduler in schedulers:", "    scheduler.step()"] if plain.has_several else ["scheduler.step()"]
    if plain.scheduler_steps == "step":
        stepped += follow
    if plain.precision == "fp16":
        lines += ["scale = scaler.get_scale()", "scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()"]
        lines += ["if scaler.get_scale() >= scale:  # else the step was left out"] if stepped else []
        lines += [f"    {line}" for line in stepped]
    elif plain.has_several:
        lines += ["for optimizer in optimizers:", "    optimizer.step()", "    optimizer.zero_grad()", *stepped]
    else:
        lines += ["optimizer.step()", "optimizer.zero_grad()", *stepped]
    if plain.scheduler_steps == "epoch":
        lines += [f"if (iteration + 1) % {plain.per_epoch} == 0:  # the end of an epoch"]
        lines += [f"    {line}" for line in follow]
    return lines


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
