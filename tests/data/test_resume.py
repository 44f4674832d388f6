"""Stopped anywhere, a run goes on in its data as if nothing had been, whatever the kind of data."""

import os
import signal
from itertools import islice

import pytest
import torch
from ignite.engine import Events

import ignite_engine
from ignite_engine import Interrupted, TrainingEvents, loader
from ignite_engine.handlers import Checkpoint, GracefulStop
from tests.data.kinds import KINDS, Samples, Stream, batch, stateful
from tests.kit.floors import of
from tests.kit.resume import EVERYWHERE, PLACES, assert_resumes, program
from tests.kit.seen import Seen

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
ONCE = {"loader that begins anew"}
"""Their iterators cannot be asked for again in the middle of a pass, as the same process would."""
QUICK = ("loader", "stream", "unsized", "torchdata", *of("windows", ("windows",)))
"""The kinds that every day resume without accumulation, too: one of each way in which a place is found again."""


def loss_of(trainer):
    return trainer.state.output["loss"].item()


def over(kind, steps=None, handlers=(), **options):
    return program([Seen, *handlers], data=KINDS[kind], accumulation_steps=steps, **options)


@pytest.mark.row("D13", "H3")
@pytest.mark.parametrize(
    ("kind", "how", "steps", "at"),
    [
        *((kind, "stop", 3, "the first ones") for kind in KINDS),
        *((kind, "same process", 3, "places") for kind in KINDS if kind not in ONCE),
        *((kind, "stop", None, "everywhere") for kind in QUICK),
        *(
            pytest.param(kind, "stop", steps, "everywhere", marks=pytest.mark.nightly)
            for steps in (3, None)
            for kind in KINDS
            if steps or kind not in QUICK
        ),
    ],
)
def test_resumes_in_mid_epoch(kind, how, steps, at, tmp_path):
    """Groups of three end a pass with a short one, while the loader says already that its pass is over."""
    limits = {"max_epochs": 3 if steps else 2}
    places = {"the first ones": (1, 2, 3), "places": PLACES, "everywhere": EVERYWHERE}[at]
    assert_resumes(over(kind, steps, limits=limits), tmp_path, at=places, how=[how])


def cut_epoch_at(iteration, event=Events.ITERATION_COMPLETED):
    def attach(trainer):
        def cut(engine):
            if engine.state.iteration == iteration and engine.state.epoch == 1:
                engine.terminate_epoch()

        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(x=1.0))
        trainer.add_event_handler(event, cut)

    return attach


LENGTHS = {
    "epochs beyond a pass": ("loader", [], {"max_epochs": 2, "epoch_length": 5}),
    "epochs beyond a pass without a length": ("unsized", [], {"max_epochs": 2, "epoch_length": 4}),
    "cut where values are written": ("loader", [cut_epoch_at(2, TrainingEvents.METRICS_READY)], {"max_epochs": 3}),
    "cut before a batch": ("DataLoader", [cut_epoch_at(2, Events.GET_BATCH_STARTED)], {"max_epochs": 3}),
    "cut in a second pass": ("loader", [cut_epoch_at(6)], {"max_epochs": 2, "epoch_length": 7}),
    "stream that is cut at its last batch": ("stream", [cut_epoch_at(4)], {"max_epochs": 3}),
    "torchdata that is cut at its last batch": ("torchdata", [cut_epoch_at(4)], {"max_epochs": 3}),
}
QUICK_LENGTHS = (
    "epochs beyond a pass without a length",
    "cut in a second pass",
    "stream that is cut at its last batch",
)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "same process") for name in LENGTHS),
        *((name, "stop") for name in LENGTHS if name in QUICK_LENGTHS),
        *(pytest.param(name, "stop", marks=pytest.mark.nightly) for name in LENGTHS if name not in QUICK_LENGTHS),
    ],
)
def test_resumes_in_epochs_of_other_lengths(name, how, tmp_path):
    kind, handlers, limits = LENGTHS[name]
    assert_resumes(
        over(kind, handlers=handlers, limits=limits), tmp_path, at=EVERYWHERE if how == "stop" else PLACES, how=[how]
    )


@pytest.mark.parametrize("read_between", [0, 1, 6])
@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("kind", ["loader", "torchdata", "stream", "list"])
def test_paused_run_goes_on_whoever_reads_its_data_meanwhile(kind, at, read_between):
    def run(pauses):
        trainer, data, lines = over(kind).build(), KINDS[kind](), []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: lines.append(loss_of(trainer)))
        if pauses:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), trainer.interrupt)
            trainer.run(data, max_epochs=2)
            before = torch.get_rng_state()
            if kind != "stream":  # whose place is where it was read last
                list(islice(data, read_between))
            torch.set_rng_state(before)
        trainer.run(data, max_epochs=2)
        return lines

    assert run(pauses=True) == run(pauses=False)


# -- ended while data is read -----------------------------------------------------------------------------------------


class Ends:
    """Sends SIGTERM to this process where a sample of this number is made, once."""

    at = None

    def __call__(self, number):
        if number == self.at:
            self.at = None
            os.kill(os.getpid(), signal.SIGTERM)


ends = Ends()


class EndingStream(Stream):
    """Its state changes before a sample is there."""

    def __iter__(self):
        while self.next < self.count:
            self.next += 1
            made = batch(self.next)
            ends(self.next)
            yield made
        self.next = 0


class EndingSamples(Samples):
    def __getitem__(self, index):
        made = super().__getitem__(index)
        ends(index + 1)
        return made


def ending_window(name):
    """Draws where it is opened."""
    batches = []
    for place in range(2):
        batches.append(batch(2 * name + place))
        ends(2 * name + place)
    return batches


ENDING = {
    "stream": EndingStream,
    "torchdata": lambda: stateful(EndingSamples(4), 1),
    "loader": lambda: loader(EndingSamples(4), 1, shuffle=True),
    **of("windows", {"windows": lambda: ignite_engine.Windows([1, 2], ending_window)}),
}


def ended_and_resumed(made, folder, attach):
    """The losses of a run that ``attach`` has end, and of the one that goes on."""
    losses = {}
    for ending in (True, False):
        trainer, data = made.build(), made.data()
        checkpoint = Checkpoint(folder, strict=True)
        checkpoint.attach(trainer)
        GracefulStop().attach(trainer)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: losses.update({engine.state.iteration: loss_of(engine)})
        )
        if ending:
            attach(trainer)
        checkpoint.resume()
        try:
            trainer.run(data, max_epochs=2)
        except Interrupted:
            assert ending
    return losses, trainer.state.iteration


@pytest.mark.parametrize("steps", [pytest.param(None, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("kind", ENDING)
def test_signal_while_data_is_read_loses_no_sample(kind, steps, tmp_path):
    made = program([Seen], data=ENDING[kind], accumulation_steps=steps)
    expected = ended_and_resumed(made, tmp_path / "whole", lambda trainer: None)
    for number in (2, 3, 4):
        ends.at = number
        found = ended_and_resumed(made, tmp_path / str(number), lambda trainer: None)
        assert ends.at is None and found == expected, number


@pytest.mark.parametrize("steps", [pytest.param(None, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("kind", sorted(ENDING.keys() - {"windows"}))
def test_run_that_ends_with_a_group_in_hand_has_it_again(kind, steps, tmp_path):
    made = program([Seen], data=ENDING[kind], accumulation_steps=steps)
    expected = ended_and_resumed(made, tmp_path / "whole", lambda trainer: None)
    for at in (1, 2, 3):

        def terminates(trainer, at=at):
            trainer.add_event_handler(Events.GET_BATCH_COMPLETED(once=at), trainer.terminate)

        assert ended_and_resumed(made, tmp_path / str(at), terminates) == expected, at
