"""The whole model at the end of a training: the rank that writes it keeps it, others have a tensor at a time."""

import weakref
from typing import Any

import pytest
import torch
from tiny_models import Tiny

import samestep
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.sharding import ShardTable
from samestep.tasks.registry import resolve
from samestep.training.fit import Training
from samestep.training.result import _apart


@pytest.mark.parametrize(
    "layout", ["fsdp2", pytest.param("pp2", marks=pytest.mark.slow), pytest.param("tp2", marks=pytest.mark.slow)]
)
def test_the_rank_that_writes_the_model_alone_keeps_it(layout: str) -> None:
    recipe = samestep.Recipe(task=Tiny(name="llama"), batch=10, steps=1)
    job = Job(recipe=recipe, run=Run(layout=layout, threads=1, device="cpu"))
    (kept, names, _), (none, _, most) = local.start(_on_each_rank, (job,), 2)
    assert (set(kept), none) == (set(names), [])
    assert most <= 2  # the one that comes, before the last is let go of


def _on_each_rank(job: Job) -> list[tuple[list[str], list[str], int]]:
    import torch.distributed as dist

    there: list[weakref.ref[Any]] = []
    most = 0
    whole = ShardTable._whole

    def noted(self: ShardTable, name: str, *rest: Any) -> Any:
        nonlocal most
        value = whole(self, name, *rest)
        if self.part(name).slice is None and self.layout.tensor > 1:
            return value  # the model's own
        if not any(value is parameter for parameter in known):
            there.append(weakref.ref(value))
            most = max(most, sum(each() is not None for each in there))
        return value

    ShardTable._whole = noted  # pyright: ignore[reportAttributeAccessIssue]
    with join(device="cpu", threads=1) as world:
        training = Training(job, resolve(job.recipe), world, Layout.parse(job.run.layout))
        trainer: Any = training.session.trainer
        known = list(trainer.model.parameters())
        state = trainer.state_to_write(kept=world.rank == 0)
        found: list[Any] = [None] * world.world_size
        dist.all_gather_object(found, (list(state), list(trainer._spread.parts.state), most))
        return found


def test_tensors_that_share_their_memory_are_written_apart() -> None:
    tied, other = torch.arange(6.0), torch.ones(2, 3).T
    written = _apart({"a": tied, "b": tied.view(2, 3), "c": other})
    assert written["a"] is tied
    assert written["b"].untyped_storage().data_ptr() != tied.untyped_storage().data_ptr()
    assert torch.equal(written["b"], tied.view(2, 3))
    assert written["c"].is_contiguous()
    assert torch.equal(written["c"], other)
