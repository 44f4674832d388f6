"""What the cookbook's blocks do beyond running."""

import torch

from ignite_engine.run_directory import RunDirectory
from tests.docs.test_snippets import DOCS, blocks_of


class Trial:
    """One of a search: values in the middle, pruned from the second epoch on if asked for."""

    def __init__(self, number, *, pruned):
        self.number, self.pruned = number, pruned
        self.reported = []

    def suggest_float(self, name, low, high, *, log):
        return (low * high) ** 0.5

    def suggest_int(self, name, low, high):
        return (low + high) // 2

    def report(self, value, step):
        self.reported.append((value, step))

    def should_prune(self):
        return self.pruned and len(self.reported) == 2


def test_trial_reports_each_epoch_and_a_pruned_one_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {}
    chosen = [block for block in blocks_of(DOCS / "cookbook.md") if block.language == "python"]
    shared, search = chosen[0], next(block for block in chosen if "def objective" in block.text)
    exec(shared.text + search.text, namespace)
    whole, pruned = Trial(0, pruned=False), Trial(1, pruned=True)
    values = [namespace["objective"](trial) for trial in (whole, pruned)]

    assert [step for _, step in whole.reported] == [1, 2, 3] and values[0] == whole.reported[-1][0]
    assert [step for _, step in pruned.reported] == [1, 2]
    summaries = [RunDirectory(f"runs/trials/{number}").read_summary() for number in (0, 1)]
    assert [(summary["epoch"], summary["reason"]) for summary in summaries] == [(3, "max_epochs"), (2, "pruned")]
