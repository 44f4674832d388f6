"""A process that a test forks is not ended by what earlier tests have left in memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpointing.file_faults import in_child


@pytest.mark.distributed
def test_a_child_does_not_collect_a_process_group_of_the_process_that_forked_it(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        cycle: list[object] = [dist.distributed_c10d._get_default_group()]
        cycle.append(cycle)
        dist.destroy_process_group()
        del cycle

        code, _ = in_child(gc.collect)
    finally:
        gc.enable()

    assert code == 0
