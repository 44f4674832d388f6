"""What a run has seen, kept in its checkpoints: ``assert_resumes`` compares it as it does any other state."""

import torch
from ignite.engine import Events


def plain(value):
    """A batch, or a group of batches, as numbers, texts and lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


class Seen:
    """``lines``: epoch, iteration and batch of each iteration, and where epochs end; or ``note(trainer)`` at ``event``.

    Resumed, it goes on from the lines that were saved.
    """

    def __init__(self, note=None, name="seen"):
        self.lines, self.name = [], name
        self.note = note or (lambda trainer: plain(trainer.state.batch))
        self.ends = note is None

    def attach(self, trainer, event=Events.ITERATION_COMPLETED):
        trainer.register(self.name, self)
        trainer.add_event_handler(event, self._write)
        if self.ends:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, self._end)

    def _write(self, trainer):
        self.lines.append([trainer.state.epoch, trainer.state.iteration, self.note(trainer)])

    def _end(self, trainer):
        self.lines.append([trainer.state.epoch, trainer.state.iteration, "end"])

    def state_dict(self):
        return {"lines": list(self.lines)}

    def load_state_dict(self, state):
        self.lines[:] = state["lines"]
