"""The data of an ejected program: seeds, the order of an epoch, windows, the micro-batches of each update."""

from __future__ import annotations

from ignite_engine.replay.eject_plain import Plain


def batches_text(plain: Plain) -> list[str]:
    """The definitions that make the batches of each update."""
    parts = [_MIX, _SEED, _epoch(plain)]
    if plain.data == "windows":
        parts.append(_windows(plain))
    parts.append(_updates(plain))
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


def data_of(plain: Plain) -> str:
    """The expression of the samples of the training set, or of its windows."""
    if plain.data == "tensors":
        return 'TensorDataset(*map(torch.as_tensor, parts["train_set"]))'
    return 'parts["train_set"].dataset' if plain.data == "loader" else 'parts["train_set"]'
