"""Parameters that each rank trains by itself are said, in the reproducibility report too, or refused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing import NotExact
from ignite_engine.errors import RanksDiffer
from ignite_engine.handlers import Checkpoint, WeightDrift
from ignite_engine.ranks import agreement
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState
from ignite_engine.states.trained import TrainedApart, trained_parameters
from tests.builders import Numbers, mse
from tests.ranks.forkserver import on_ranks


class _Margin(nn.Module):
    """A loss function with a parameter of its own, as ArcFace's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.scale * model(inputs), targets)


def _trainer(model: nn.Module, loss_fn: Any = mse, parameters: Any = None, **options: Any) -> Trainer:
    held = [*model.parameters()] if parameters is None else parameters
    return Trainer(Update(model, torch.optim.SGD(held, lr=0.1), loss_fn, **options))


def _run(trainer: Trainer, epochs: int = 2, iterations: int | None = None) -> None:
    length = {"max_epochs": epochs} if iterations is None else {"max_iters": iterations}
    trainer.run(loader(Numbers(8), 2), **length)


def _linear() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(3, 1)


def _two_layers() -> nn.Sequential:
    return nn.Sequential(_linear(), nn.Linear(1, 1))


def _said(trainer: Trainer, caplog: Any, rank: int) -> str:
    """What was logged while it trained and drifted; nothing but rank 0 says it."""
    caplog.clear()
    WeightDrift().attach(trainer, Events.ITERATION_COMPLETED)
    with pytest.raises(RanksDiffer) as drift:
        _run(trainer)
    assert "at iteration 1" in str(drift.value)
    lines = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert len(lines) == (rank == 0), lines
    (reason,) = trainer.reproducibility()
    assert "and rank 0's are saved" in reason
    return lines[0] if lines else ""


class _Records(logging.Handler):
    """As pytest's ``caplog``, in a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.clear = self.records.clear

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _records() -> _Records:
    records = _Records()
    logging.getLogger("ignite_engine").addHandler(records)
    return records


def _trains_apart(rank: int, folder: str) -> None:
    said = _records()

    margin = _Margin()
    model = DistributedDataParallel(_linear())
    line = _said(_trainer(model, margin, [*model.parameters(), *margin.parameters()]), said, rank)
    assert rank or ("parameters/loss_fn.scale by itself" in line and "part of the model" in line)

    line = _said(_trainer(_linear()), said, rank)
    assert rank or ("wrap the whole model" in line and "(2 of the parameters)" in line)

    half = nn.Sequential(DistributedDataParallel(_linear()), nn.Linear(1, 1))
    line = _said(_trainer(half), said, rank)
    assert rank or "trains 1.weight, 1.bias by itself (2 of" in line

    trainer = _trainer(_linear())
    assert "reduced by nothing" in trainer.describe(loader(Numbers(8), 2), max_epochs=1)
    Checkpoint(f"{folder}/strict", strict=True).attach(trainer)
    with pytest.raises(NotExact, match="by itself"):
        _run(trainer)


def _is_reduced(rank: int, folder: str) -> None:
    said = _records()
    _inside_of_ddp()
    wrapped = DistributedDataParallel(_two_layers())
    trainers = {
        "DistributedDataParallel": _trainer(wrapped),
        "rank_invariant": Trainer(
            Update(plain := _linear(), torch.optim.SGD(plain.parameters(), lr=0.1), mse, rank_invariant=True),
            global_micro_batches=2,
        ),
    }
    hooked = _linear()
    for parameter in hooked.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    trainers["a gradient hook"] = _trainer(hooked)
    for reducer, trainer in trainers.items():
        WeightDrift().attach(trainer, Events.ITERATION_COMPLETED)
        _run(trainer)
        assert trainer.reproducibility() == []
        assert {row.reduced_by for row in trained_parameters(trainer.registry.objects)} == {reducer}
    assert f"reduced by {reducer}" in trainer.describe(loader(Numbers(8), 2), max_epochs=1)
    assert not [each for each in said.records if "by itself" in each.getMessage()]


def _inside_of_ddp() -> None:
    """Frozen after it was wrapped, and unfrozen within the run."""
    model = _two_layers()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    trainer = _trainer(wrapped)
    before = model[0].weight.detach().clone()
    trainer.add_event_handler(Events.EPOCH_STARTED(once=2), lambda: model[0].requires_grad_(True))
    WeightDrift().attach(trainer, Events.ITERATION_COMPLETED)
    _run(trainer)
    assert trainer.reproducibility() == [] and not torch.equal(model[0].weight, before)


def _unfrozen_late(rank: int, folder: str) -> None:
    for begun in (False, True):
        model = _two_layers()
        model[0].requires_grad_(False)
        trainer = _trainer(DistributedDataParallel(model))
        if begun:
            trainer.add_event_handler(Events.EPOCH_STARTED(once=2), partial(model[0].requires_grad_, True))
        else:
            model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias needed no gradient.* find_unused_parameters=True"):
            _run(trainer)
        assert trainer.state.iteration == (2 if begun else 0)
    _unfrozen_beside_a_table()


class _WithTable(nn.Module):
    """A part of it has sparse gradients, whose DDP does not show its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = _linear(), nn.Linear(1, 1).requires_grad_(False)
        self.table = nn.Embedding(2, 1, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.table(torch.zeros(len(inputs), dtype=torch.long))
        return self.frozen(self.layer(inputs)) + rows  # type: ignore[no-any-return]


def _unfrozen_beside_a_table() -> None:
    model = _WithTable()
    trainer = _trainer(DistributedDataParallel(model))
    trainer.add_event_handler(Events.EPOCH_STARTED(once=2), partial(model.frozen.requires_grad_, True))
    with pytest.raises(ValueError, match=r"frozen\.weight, frozen\.bias needed no gradient"):
        _run(trainer)


def _own_update(model: nn.Module, optimizer: Any, *, reduces: bool = False, from_iteration: int = 1) -> Any:
    """A user's own update function, which may reduce gradients itself."""

    def update(engine: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if reduces:
                dist.all_reduce(parameter.grad)
        if engine.state.iteration >= from_iteration:
            optimizer.step()
        return float(loss.detach())

    return update


def _own_functions(rank: int, folder: str) -> None:
    """What any callable trains is compared between the ranks after its first updates."""
    said, number = _records(), itertools.count()

    def trained(
        model: nn.Module,
        *,
        parts: tuple[str, ...] = ("model", "sgd"),
        strict: bool = False,
        lr: float = 0.1,
        outside: tuple[nn.Parameter, ...] = (),
        iterations: int | None = None,
        **options: Any,
    ) -> tuple[list[str], list[str]]:
        said.clear()
        optimizer = torch.optim.SGD([*model.parameters(), *outside], lr=lr, momentum=0.9)
        trainer = Trainer(_own_update(model, optimizer, **options))
        for name, obj in (("model", model), ("sgd", optimizer)):
            if name in parts:
                trainer.register(name, obj, shared=True)
        Checkpoint(f"{folder}/{next(number)}", strict=strict).attach(trainer)
        _run(trainer, iterations=iterations)
        lines = [record.getMessage() for record in said.records if "each rank trains" in record.getMessage()]
        return lines, [reason for reason in trainer.reproducibility() if "each rank" in reason]

    lines, reasons = trained(_linear())
    assert bool(lines) == (rank == 0) and reasons == [
        "each rank trains weight, bias by itself (2 of the parameters), as nothing reduces it, and rank 0's are saved"
    ]
    assert trained(_linear(), from_iteration=3)[1] == reasons, "an update that changed nothing was taken for a proof"
    late = trained(_linear(), from_iteration=3, iterations=3)[1]
    assert late == reasons, "what ranks train apart in the iteration after skipped ones was not seen"
    assert trained(_linear(), reduces=True) == ([], [])
    assert trained(DistributedDataParallel(_linear())) == ([], [])
    assert trained(DistributedDataParallel(_linear()), parts=()) == ([], [])
    unregistered = trained(_linear(), parts=("model",))[1]
    assert unregistered and "weight, bias" in unregistered[0], "an optimizer that is not registered was not seen"
    half = nn.Sequential(DistributedDataParallel(_linear()), nn.Linear(1, 1))
    assert "trains 1.weight, 1.bias by itself (2 of" in trained(half)[1][0]
    apart = (nn.Parameter(torch.full((1,), float(rank))),)
    assert "trains sgd.2 by itself (1 of" in trained(DistributedDataParallel(_linear()), outside=apart)[1][0]
    with pytest.raises(NotExact, match="by itself"):
        trained(_linear(), strict=True)
    assert trained(_linear(), lr=0.0)[1] == [
        "each rank has its own optimizer state of bias, optimizer state of weight, and rank 0's are saved"
    ], "weights that a rate of 0 leaves alone were taken for a proof"
    assert trained(nn.Sequential(nn.BatchNorm1d(3), _linear()), reduces=True)[1] == [
        "each rank has its own buffer 0.running_mean, buffer 0.running_var, and rank 0's are saved"
    ]
    assert trained(DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(3), _linear())))[1] == []


def _held_and_not_reduced(rank: int, folder: str) -> None:
    """What DDP or a mesh holds is seen to train apart where nothing reduces it all the same."""
    said = _records()

    def inside(model: Any, batch: Any) -> Tensor:
        return mse(model.module, batch)

    def lines() -> list[str]:
        return [record.getMessage() for record in said.records if "apart" in record.getMessage()]

    trainer = _trainer(DistributedDataParallel(_linear()), inside)
    _run(trainer)
    (reason,) = trainer.reproducibility()
    assert reason.startswith("the ranks have trained weight, bias apart, though DistributedDataParallel is to reduce")
    assert len(lines()) == (rank == 0) and (rank or "call the wrapped model itself" in lines()[0])

    strict = _trainer(DistributedDataParallel(_linear()), inside)
    Checkpoint(f"{folder}/held", strict=True).attach(strict)
    with pytest.raises(NotExact, match="trained weight, bias apart"):
        _run(strict)
    assert strict.state.iteration == 1

    beside = _trainer(DistributedDataParallel(_linear()))
    head = nn.Linear(1, 1)
    head.weight.data.fill_(rank)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    beside.register("head", head, shared=True)
    beside.register("head_optimizer", optimizer, shared=True)
    _run(beside)
    assert "trains weight by itself" in beside.reproducibility()[0], "a handler's own optimizer was not looked at"

    late = _two_layers()
    late[0].requires_grad_(False)
    trainer = _trainer(DistributedDataParallel(late))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: late[0].requires_grad_(True))
    _run(trainer, iterations=6)
    assert "trains 0.weight, 0.bias by itself" in trainer.reproducibility()[0]

    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "shard"))["shard"]
    sharded = _trainer(fully_shard(_linear(), mesh=alone))
    assert [row.reduced_by for row in trained_parameters(sharded.registry.objects)] == [None, None]


def _own_functions_late(rank: int, folder: str) -> None:
    """What a custom update holds in containers, begins late, or trains in a second run."""

    def reasons(update: Any, model: nn.Module, runs: int = 1, **length: Any) -> list[str]:
        trainer = Trainer(update)
        trainer.register("model", model, shared=True)
        for _ in range(runs):
            _run(trainer, **length)
        return [reason for reason in trainer.reproducibility() if "rank" in reason]

    first = _linear()
    optimizers = {"all": torch.optim.SGD(first.parameters(), lr=0.1)}

    def of_a_dict(engine: Any, batch: Any) -> None:
        _own_update(first, optimizers["all"])(engine, batch)

    assert "weight, bias by itself" in reasons(of_a_dict, first)[0]

    second = _linear()

    def by_hand(engine: Any, batch: Any) -> None:
        gradients = torch.autograd.grad(mse(second, batch), [*second.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(second.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient

    assert "weight, bias by itself" in reasons(by_hand, second)[0]

    third = _linear()
    sgd = torch.optim.SGD(third.parameters(), lr=0.1)

    def from_the_sixth_on(engine: Any, batch: Any) -> None:
        _own_update(third, sgd, reduces=engine.state.iteration < 6)(engine, batch)

    assert "weight, bias by itself" in reasons(from_the_sixth_on, third, iterations=7)[0]

    fourth, starts = _linear(), itertools.count()
    adam = torch.optim.Adam(fourth.parameters())

    def in_the_second_run(engine: Any, batch: Any) -> None:
        if engine.state.iteration == 1:
            next(starts)
        _own_update(fourth, adam, reduces=f"{starts}" == "count(1)")(engine, batch)

    assert "weight, bias by itself" in reasons(in_the_second_run, fourth, runs=2)[0]

    fifth = DistributedDataParallel(_linear())
    scaler, sgd_of_fifth = (
        torch.amp.GradScaler("cpu", init_scale=2.0**rank),
        torch.optim.SGD(fifth.parameters(), lr=0.0),
    )

    def scaled(engine: Any, batch: Any) -> None:
        sgd_of_fifth.zero_grad()
        scaler.scale(mse(fifth, batch)).backward()  # type: ignore[no-untyped-call]
        scaler.step(sgd_of_fifth)
        scaler.update()

    assert "loss scaler" in reasons(scaled, fifth)[0]

    seventh = DistributedDataParallel(_linear())
    torch.manual_seed(rank)
    untrained = nn.Linear(3, 1)  # of the same names, and another one on each rank
    lbfgs = torch.optim.LBFGS(seventh.parameters(), max_iter=2)

    def beside_another(engine: Any, batch: Any) -> None:
        def closure() -> Tensor:
            lbfgs.zero_grad()
            loss = mse(seventh, batch) + 0 * untrained(batch[0]).detach().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        lbfgs.step(closure)  # type: ignore[arg-type]  # torch's takes a float

    assert reasons(beside_another, seventh) == [], "what no rank trains apart was named"

    sixth = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(3), _linear()), broadcast_buffers=False)
    sgd_of_sixth = torch.optim.SGD(sixth.parameters(), lr=0.1)
    found = reasons(lambda engine, batch: _own_update(sixth, sgd_of_sixth)(engine, batch), sixth)
    assert any("buffer 0.running_mean" in reason for reason in found), found


class _Moving(nn.Module):
    """A mean, or a count, of this rank's inputs that is added to them."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=dtype), persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            moved = 0.1 * inputs.detach().mean() if self.seen.is_floating_point() else (inputs > 0).sum()
            self.seen += moved.to(self.seen.dtype)
        return inputs + 0.01 * self.seen


class _Constant(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.value  # type: ignore[no-any-return]


def _reasons_of(trainer: Trainer, iterations: int = 3) -> list[str]:
    _run(trainer, iterations=iterations)
    return [reason for reason in trainer.reproducibility() if "rank" in reason]


def _of_buffers(rank: int, folder: str) -> None:
    """Of an Update: those that DDP does not share are compared by value."""
    own = "each rank has its own buffer {}, and rank 0's are saved"

    def sharded(*layers: nn.Module) -> nn.Module:
        model = nn.Sequential(*layers)
        fully_shard(model)
        return model

    assert _reasons_of(_trainer(nn.Sequential(DistributedDataParallel(_linear()), _Moving()))) == [own.format("1.seen")]
    assert _reasons_of(_trainer(sharded(_Moving(), _linear()))) == [own.format("0.seen")]
    statistics = "0.running_mean, buffer 0.running_var"
    assert _reasons_of(_trainer(sharded(nn.BatchNorm1d(3), _linear()))) == [own.format(statistics)]
    for layer, found in ((_Moving(torch.int64), [own.format("0.seen")]), (_Constant(torch.ones(1)), [])):
        model = DistributedDataParallel(nn.Sequential(layer, _linear()), broadcast_buffers=False)
        assert _reasons_of(_trainer(model)) == found
    strict = _trainer(sharded(_Moving(), _linear()))
    Checkpoint(f"{folder}/strict", strict=True).attach(strict)
    with pytest.raises(NotExact, match=r"its own buffer 0\.seen"):
        _run(strict)
    assert strict.state.iteration == 1

    layers = nn.Sequential(nn.BatchNorm1d(3), _Moving(), _linear())
    ignored = DistributedDataParallel
    ignored._set_params_and_buffers_to_ignore_for_model(layers, ["1.seen"])  # type: ignore[no-untyped-call]
    trainer = _trainer(ignored(layers))
    assert _reasons_of(trainer) == [own.format("1.seen")], "what DDP is told to ignore is not shared"
    # rank 1's statistics are replaced before the next forward, and so are copies of them
    model = nn.Sequential(nn.BatchNorm1d(3), _linear())
    trainer = _trainer(DistributedDataParallel(model))
    average = AveragedModel(model)
    trainer.register("average", average, shared=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: average.update_parameters(model))
    assert _reasons_of(trainer) == []
    everyones = agreement.gather_objects(model[0].running_mean.tolist())
    assert everyones[0] != everyones[1]


def _of_frozen_parameters(rank: int, folder: str) -> None:
    """What no rank trains is compared, too: a resumed rank has rank 0's."""
    found = ["the ranks have different values of 0.weight, 0.bias, and rank 0's are saved"]
    for wrap in (DistributedDataParallel, fully_shard):
        torch.manual_seed(rank)
        frozen, trained = nn.Linear(3, 3).requires_grad_(False), wrap(_linear())
        said = _records()
        assert _reasons_of(_trainer(nn.Sequential(frozen, trained), parameters=[*trained.parameters()])) == found
        lines = [record.getMessage() for record in said.records if "different values" in record.getMessage()]
        assert len(lines) == (rank == 0) and all("from the same seed" in line for line in lines)

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), DistributedDataParallel(_linear()))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    trainer = Trainer(_step_of(model, optimizer))
    trainer.register("model", model, shared=True)
    trainer.register("optimizer", optimizer, shared=True)
    assert _reasons_of(trainer) == found

    kept = Trainer(_step_of(model[1], optimizer))
    kept.register("model", model[1], shared=True)
    kept.register("each rank's own", model[0])
    assert _reasons_of(kept) == [], "each rank saves its own"


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def update(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return update


class _OwnUpdate:
    """As in the documentation: a class that says what it saves."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer | None, *, reduces: bool = False) -> None:
        self.net, self.optimizer, self.reduces = net, optimizer, reduces

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        yield "model", ModelState(self.net), True
        if self.optimizer is not None:
            yield "optimizer", OptimizerState(self.optimizer, self.net), True

    def __call__(self, engine: Engine, batch: Any) -> None:
        gradients = torch.autograd.grad(mse(self.net, batch), [*self.net.parameters()])
        for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
            if self.reduces:
                dist.all_reduce(gradient)
            parameter.grad = gradient
            if self.optimizer is None:
                parameter.data -= 0.1 * gradient
        if self.optimizer is not None:
            self.optimizer.step()


class _Averages(Update):
    """Averages gradients itself, over a model that is in nothing."""

    def accumulate(self, engine: Engine, micro_batches: Any, scales: list[float]) -> dict[str, Tensor]:
        output = super().accumulate(engine, micro_batches, scales)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        return output


def _of_own_classes(rank: int, folder: str) -> None:
    """An update class of the user's is judged by what the ranks have, as a function is."""

    def found(net: nn.Module, kind: Any = torch.optim.SGD, lr: float = 0.1, *, reduces: bool = False) -> list[str]:
        optimizer = None if kind is None else kind(net.parameters(), lr=lr)
        trainer = Trainer(_OwnUpdate(net, optimizer, reduces=reduces))
        assert trainer.reproducibility() == [], "judged before anything was trained"
        return _reasons_of(trainer)

    apart = (
        "each rank trains weight, bias by itself (2 of the parameters), as nothing reduces it, and rank 0's are saved"
    )
    assert found(_linear()) == found(_linear(), None) == [apart]
    assert found(_linear(), reduces=True) == found(_linear(), None, reduces=True) == []
    moving = nn.Sequential(_Moving(), _linear())
    assert found(moving, reduces=True) == ["each rank has its own buffer 0.seen, and rank 0's are saved"]
    states = "each rank has its own optimizer state of bias, optimizer state of weight, and rank 0's are saved"
    assert found(_linear(), torch.optim.Adam, lr=0.0) == [states]

    model = _linear()
    assert _reasons_of(Trainer(_Averages(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))) == []


class _Marked(torch.optim.SGD):
    """Keeps a number of its rank's in its state, which steers nothing."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rank"] = torch.tensor(float(dist.get_rank()))
        return super().step(closure)


def _of_odd_parts(rank: int, folder: str) -> None:
    """What has no values, a conjugate, a state that steers nothing, a model of one rank."""

    def found(update: Any, **parts: Any) -> list[str]:
        trainer = Trainer(update)
        for name, part in parts.items():
            trainer.register(name, part, shared=True)
        return _reasons_of(trainer)

    model = DistributedDataParallel(_linear())
    optimizer = _Marked(model.parameters(), lr=0.1)
    states = "each rank has its own optimizer state of bias, optimizer state of weight, and rank 0's are saved"
    assert found(_step_of(model, optimizer), model=model, optimizer=optimizer) == [states]

    with_lazy = nn.ModuleList([model, nn.LazyLinear(1)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found(_step_of(model, sgd), model=with_lazy, sgd=sgd) == []

    holder = nn.Module()
    holder.weight = nn.Parameter(torch.full((3,), 1 + 1j + rank).conj())
    (reason,) = found(lambda engine, batch: holder.weight, model=holder)
    assert reason.startswith("the ranks have different values of weight")

    probe = nn.Linear(1, 1) if rank == 0 else None
    of_probe = None if probe is None else torch.optim.SGD(probe.parameters(), lr=0.1)

    def probed(engine: Any, batch: Any) -> None:
        _step_of(model, sgd)(engine, batch)
        if probe is not None and of_probe is not None:
            _step_of(probe, of_probe)(engine, (model(batch[0]).detach(), batch[1]))

    assert found(probed, model=model, sgd=sgd) == ["rank 0 alone has weight, bias"]


class _OwnState(nn.Linear):
    """Saves itself without the arguments that torch's method has."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.weight.detach(), "b": self.bias.detach()}


def _of_saved_buffers(rank: int, folder: str) -> None:
    """Which buffers are saved is known without a call of the model's own state_dict."""
    assert _reasons_of(_trainer(DistributedDataParallel(_OwnState(3, 1)))) == []
    for persistent, found in ((True, ["each rank has its own buffer 1.seen, and rank 0's are saved"]), (False, [])):
        model = nn.Sequential(DistributedDataParallel(_OwnState(3, 1)), _Moving(persistent=persistent))
        update = _step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trainer = Trainer(update)
        trainer.register("model", model, shared=True)
        assert _reasons_of(trainer) == found


class _Largest(nn.Module):
    """Divides by the largest input of its rank so far, which it saves beside its tensors."""

    def __init__(self, *, of_all: bool) -> None:
        super().__init__()
        self.largest, self.of_all = torch.ones(()), of_all

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, inputs.detach().abs().max())
            if self.of_all:
                dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        return inputs / self.largest

    def get_extra_state(self) -> dict[str, Any]:
        return {"largest": self.largest, "of_all": self.of_all}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"]


def _of_extra_states(rank: int, folder: str) -> None:
    """What a module saves beside its tensors is one rank's, too."""
    reason = "each rank has its own extra state 0, and rank 0's are saved"
    for of_all, found in ((False, [reason]), (True, [])):
        for wrap in (DistributedDataParallel, fully_shard):
            assert _reasons_of(_trainer(wrap(nn.Sequential(_Largest(of_all=of_all), _linear())))) == found
    strict = _trainer(DistributedDataParallel(nn.Sequential(_Largest(of_all=False), _linear())))
    Checkpoint(f"{folder}/strict", strict=True).attach(strict)
    with pytest.raises(NotExact, match="its own extra state 0"):
        _run(strict)


class _Placed(nn.Linear):
    """Its place in a set is given."""

    def __init__(self, place: int) -> None:
        super().__init__(3, 1)
        self.place = place

    def __hash__(self) -> int:
        return self.place


def _of_sets(rank: int, folder: str) -> None:
    """What a set holds is compared, though each rank has it in an order of its own."""
    for apart in (False, True):
        torch.manual_seed(0)
        first, second = _Placed(rank), _Placed(1 - rank)
        models = {first, second}
        assert agreement.gather_objects(next(iter(models)) is first) == [True, False]
        optimizers = {torch.optim.Adam(model.parameters(), lr=0.1) for model in models}

        def update(engine: Any, batch: Any, models: Any = models, optimizers: Any = optimizers) -> None:
            for model in sorted(models, key=lambda each: float(each.bias)):
                mse(model, batch).backward()  # type: ignore[no-untyped-call]
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        def alone(engine: Any, batch: Any, update: Any = update, models: Any = models) -> None:
            update(engine, batch)
            with torch.no_grad():
                max(models, key=lambda each: float(each.bias)).bias.add_(0.01 * dist.get_rank())

        trainer = Trainer(alone if apart else update)
        trainer.register("hyper", _Hyper(), shared=True)
        found = _reasons_of(trainer)
        assert len(found) == apart and all("trains bias" in reason and "weight" not in reason for reason in found)


class _Hyper:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Reducing(torch.optim.SGD):
    """Averages gradients itself in its step, or does not."""

    reduces = True

    def step(self, closure: Any = None) -> Any:
        if self.reduces:
            _average(self)
        return super().step(closure)


def _average(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            dist.all_reduce(parameter.grad)


def _of_optimizers(rank: int, folder: str) -> None:
    """An optimizer that may reduce gradients itself is judged by what the ranks have."""
    said = _records()

    def trainer(kind: Any, hook: Any = None, *, reduces: bool = True) -> Trainer:
        model = _linear()
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.reduces = reduces
        if hook is not None:
            optimizer.register_step_pre_hook(hook)
        return Trainer(Update(model, optimizer, mse))

    for reducing in (trainer(_Reducing), trainer(torch.optim.SGD, _average)):
        assert _reasons_of(reducing) == [] and said.records == []
    apart = [
        "each rank trains weight, bias by itself (2 of the parameters), as nothing reduces it, and rank 0's are saved"
    ]
    for number, alone in enumerate([trainer(_Reducing, reduces=False), trainer(torch.optim.SGD, lambda *_: None)]):
        Checkpoint(f"{folder}/{number}", strict=True).attach(alone)
        with pytest.raises(NotExact, match="by itself"):
            _run(alone)
        assert alone.state.iteration == 1 and [each for each in alone.reproducibility() if "rank" in each] == apart


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "work", [_trains_apart, _is_reduced, _unfrozen_late, _own_functions, _held_and_not_reduced, _own_functions_late]
)
def test_ranks(work: Any, tmp_path: Path) -> None:
    on_ranks(2, work, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("work", [_of_buffers, _of_frozen_parameters, _of_own_classes, _of_odd_parts])
def test_what_differs_between_ranks_is_seen_by_its_values(work: Any, tmp_path: Path) -> None:
    on_ranks(2, work, tmp_path)


@pytest.mark.distributed
def test_a_model_may_have_a_state_dict_without_arguments(tmp_path: Path) -> None:
    on_ranks(2, _of_saved_buffers, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_extra_state_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    on_ranks(2, _of_extra_states, tmp_path)


@pytest.mark.distributed
def test_sets_may_have_another_order_on_each_rank(tmp_path: Path) -> None:
    on_ranks(2, _of_sets, tmp_path)


@pytest.mark.distributed
def test_an_optimizer_may_average_gradients_itself(tmp_path: Path) -> None:
    on_ranks(2, _of_optimizers, tmp_path)


def test_one_process_trains_nothing_apart() -> None:
    trainer = _trainer(_linear())
    assert trainer.reproducibility() == []
    assert [(row.name, row.optimizer, row.reduced_by) for row in trained_parameters(trainer.registry.objects)] == [
        ("weight", "optimizer", None),
        ("bias", "optimizer", None),
    ]


def test_an_own_update_is_compared_at_iterations_that_come_twice_as_far_from_where_the_run_began() -> None:
    engine = Engine(lambda engine, batch: None)
    compared = TrainedApart({}, (), engine._process_function)
    for began in (0, 10):
        engine.state.iteration = began
        compared.watch(engine, boundary=Events.COMPLETED)
        at = [done for done in range(1, 20) if compared.is_compared(engine, began + done)]
        assert at == [1, 2, 4, 8, 16]
