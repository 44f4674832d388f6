"""Two nodes, which are two network namespaces that a pair of virtual interfaces joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.nodes import can_join_namespaces, joined_namespaces, start_nodes
from tests.faults.processes import lines, summary, train, write_config


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.skipif(not can_join_namespaces(), reason="network namespaces cannot be made here")
def test_two_nodes_under_torchrun_train_to_the_bits_of_as_many_ranks_on_one(tmp_path: Path) -> None:
    options = {"run": {"max_epochs": 2}, "task_options": {"count_reductions": True}}  # whose handler notes both ranks
    train(write_config(tmp_path / "one", **options), "--nproc-per-node", "2", "--backend", "gloo")
    config = write_config(tmp_path / "two", **options)
    with joined_namespaces() as namespaces:
        codes = [node.wait(120) for node in start_nodes(config, namespaces, ranks_per_node=1)]

    assert codes == [0, 0], (tmp_path / "two" / "output.txt").read_text()
    assert len(list((tmp_path / "two").glob("reductions_*.json"))) == 2
    assert lines(tmp_path / "two") == lines(tmp_path / "one")
    assert summary(tmp_path / "two")["weights_sha256"] == summary(tmp_path / "one")["weights_sha256"]
