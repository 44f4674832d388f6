"""How cases are drawn: each dimension keeps its plainest value in half of them, so that failures are simple."""

from hypothesis import strategies as st

from tests.kit.floors import has
from tests.property.case import (
    DDP,
    EACH_ITS_OWN,
    EVENTS,
    EXACT_DATA,
    HANDLERS,
    HOW,
    IGNITE,
    LAYERS,
    LISTENERS,
    RESUME,
    SHARED,
    UPDATE,
    Case,
    Stop,
    settled_ranks,
    settled_resume,
    settled_update,
)

# how often these are other than plain, of ten times; five, where it is not said
RATES = {"workers": 1, "background": 3, "memory": 3, "exclude": 1, "on_exception": 2, "damage": 2, "non_finite": 2}
RATES |= {"precision": 3, "reports": 3, "outside": 3, "loss": 3, "optimizer": 8, "steps": 6, "schedule": 6, "change": 6}
RATES |= {"wrong_calls": 2, "drop_last": 3, "evaluation": 6, "samples": 8, "batch_size": 8, "every": 7, "seed": 8}


def some(values, count=3):
    return st.lists(st.sampled_from(values), max_size=count, unique=True).map(tuple)


def often_plain(name, values):
    if name == "layers":
        return some(LAYERS)
    return st.integers(0, 9).flatmap(
        lambda tenth: st.sampled_from(values[1:]) if tenth > 9 - RATES.get(name, 5) else st.just(values[0])
    )


def of_what_is_there(case):
    """With what a package of ``ext/`` does replaced, where it is not there."""
    missing = {
        "windows": [name for name in ("data", "evaluation", "saves") if "windows" in getattr(case, name)],
        "recovery": ["memory"],
        "rank_invariant": ["rank_invariant"],
    }
    plain = [name for package, names in missing.items() if not has(package) for name in names]
    return case.but(**{name: getattr(Case, name) for name in plain})


def drawn(dimensions, settle, **more):
    every = {name: often_plain(name, values) for name, values in dimensions.items()}
    return st.builds(Case, **(every | more)).map(of_what_is_there).map(settle)


shares = st.integers(1, 19).map(lambda share: share / 20)
counts = st.sampled_from((3, 0, 1, 2, 5, 8))


def stops(how=HOW, most=2, ranks=1):
    one = st.builds(Stop, st.sampled_from(how), st.sampled_from(EVENTS), shares, st.integers(0, ranks - 1))
    return st.lists(one, min_size=1, max_size=most).map(tuple)


updates = drawn(
    UPDATE,
    settled_update,
    listeners=some(LISTENERS),
    sizes=st.lists(st.integers(2, 5), min_size=2, max_size=7).map(tuple),
)
captured = drawn(
    {name: UPDATE[name] for name in ("steps", "clip", "weights", "seed")},
    settled_update,
    layers=st.sampled_from(((), ("dropout",), ("batchnorm",))),
    precision=st.sampled_from(("fp32", "bf16")),
    hooked=st.sampled_from(("nothing", "LR scheduler")),
    epochs=st.just(1),
    optimizer=st.sampled_from(("SGD", "SGD momentum", "AdamW for-loop")),
    sizes=st.integers(4, 8).map(lambda count: (4,) * count),
)
resumes = drawn(
    RESUME,
    settled_resume,
    stops=stops(),
    handlers=some(HANDLERS, 2),
    ignite=some(IGNITE, 2),
    # not so often: data without a state, of whose resume little is promised
    data=st.one_of(*[st.sampled_from(EXACT_DATA)] * 4, st.sampled_from(RESUME["data"])),
    windows=st.lists(counts, min_size=1, max_size=5).filter(any).map(tuple),
    per_epoch=st.sampled_from((None, None, 1, 2, 3)),
    max_updates=st.sampled_from((None, None, 1, 3)),
)
OF_RANKS = {
    name: RESUME[name]
    for name in (
        *("layers", "embedding", "optimizer", "grouping", "precision", "steps", "clip", "weights", "reports", "seed"),
        *("non_finite", "augmentation", "drop_last", "schedule", "ema", "evaluation", "early_stopping", "log", "saves"),
        *("every", "keep_last", "best", "background", "batch_size", "epochs"),
    )
}
ranked = drawn(
    OF_RANKS,
    settled_ranks,
    ranks=st.sampled_from((2, 2, 3, 4)),
    ranks_after=st.sampled_from((0, 0, 1, 2, 3, 4)),
    rank_invariant=st.sampled_from((False, False, False, True)),
    global_micro_batches=st.sampled_from((None, None, None, None, 4, 5, 6)),
    ddp=st.sampled_from((DDP[0], *DDP)),
    data=st.sampled_from((*SHARED, *EACH_ITS_OWN, "windows")),
    batches=st.lists(st.sampled_from((2, 0, 1, 3, 4)), min_size=4, max_size=4).map(tuple),
    samples=st.sampled_from((12, 1, 3, 5, 17, 29)),
    handlers=some(HANDLERS, 2),
    ignite=some(IGNITE, 1),
    windows=st.lists(counts, min_size=1, max_size=4).filter(any).map(tuple),
    stops=stops(("stop", "stop", "SIGTERM", "SIGTERM", "SIGKILL"), 1, 4),
    one_process=st.sampled_from((False, False, True)),
)
