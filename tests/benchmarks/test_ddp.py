"""The benchmark of DDP trains on two ranks, every contender to the same weights. Contents, never times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import ddp
from ignite_engine.ranks import agreement


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_ranks")
def test_every_contender_is_timed_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert ddp.main(["--rounds", "2", "--steps", "3", "--width", "8", "--json", str(target)]) == 0
    times = json.loads(target.read_text())["seconds_per_step"]
    assert {ddp.PLAIN, ddp.OURS} <= set(times) and all(len(each) == 2 and min(each) > 0 for each in times.values())
    assert "all ended with the same weights" in capsys.readouterr().out


def test_other_weights_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = ddp.Work.ours

    def with_one_more_epoch(work: ddp.Work) -> Callable[[], None]:
        turn = trained(work)
        turn()
        return turn

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert set(ddp._work(1, 2, 8)) >= {ddp.PLAIN, ddp.OURS}
        monkeypatch.setattr(ddp.Work, "ours", with_one_more_epoch)
        with pytest.raises(RuntimeError, match="ours ended with other weights than the loop by hand"):
            ddp._work(1, 2, 8)
    finally:
        agreement.forget_groups()
        dist.destroy_process_group()
