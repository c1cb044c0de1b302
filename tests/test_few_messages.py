"""How many messages a step takes: large ones, not one for each parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.launch import local

WIDTH, LAYERS = 16, 12
MIB = 2**20


class Layers(Points):
    """As many square layers as make one message a parameter visible."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))

    def train_set(self) -> samestep.Samples:
        vectors = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
        return [(vector, vector) for vector in vectors]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return (output - batch.targets).square().sum(), len(output)


class Scaled(nn.Module):
    """Blocks, and beside them a scale and a shift, of which each is used before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, given: Tensor) -> Tensor:
        return self.blocks(given * self.scale + self.shift) * self.scale + self.shift


class ScaledLayers(Layers):
    def model(self) -> nn.Module:
        return Scaled()


def _of_third_step(
    layouts: Sequence[str], micro_batch: int | None = None, task: Layers | None = None
) -> dict[str, Mapping[str, int]]:
    """By layout, how many collectives of each kind this rank's third step has."""
    from samestep.comm.traffic import Traffic
    from samestep.job import Job, Run
    from samestep.launch.world import join
    from samestep.layout import Layout
    from samestep.training.fit import Training

    found: dict[str, Mapping[str, int]] = {}
    with join(device="cpu", threads=1) as world:
        for layout in layouts:
            mine = task or Layers()
            job = Job(
                recipe=samestep.Recipe(task=mine, batch=16, steps=4), run=Run(layout=layout, micro_batch=micro_batch)
            )
            steps = Training(job, mine, world, Layout.parse(layout)).steps(stop=3)
            next(steps)
            next(steps)
            with Traffic() as traffic:
                next(steps)
            found[layout] = dict(traffic.calls)
    return found


@pytest.mark.slow
def test_stages_gather_their_shards_once_a_step_under_zero2_and_for_every_micro_batch_under_fsdp() -> None:
    of_four = local.start(_of_third_step, (["zero2x2 pp2", "fsdp2 pp2"], 2), 4)
    micro_batches, units = 4, LAYERS // 2  # of 16 samples on two ranks, two each; of a stage
    assert of_four["zero2x2 pp2"]["all-gather"] == units
    assert of_four["fsdp2 pp2"]["all-gather"] >= 2 * units * micro_batches - 2 * micro_batches  # forward and backward
    assert of_four["zero2x2 pp2"]["reduce-scatter"] == of_four["fsdp2 pp2"]["reduce-scatter"] == units


@pytest.mark.slow
def test_optimizer_shards_and_replicas_of_stages_send_few_large_messages() -> None:
    of_two = local.start(_of_third_step, (["zero1x2", "dp2"],), 2)
    assert of_two["dp2"]["all-reduce"] == 2  # all gradients; the losses' sum with the flags of used parameters
    assert of_two["zero1x2"]["broadcast"] == 2  # what each of the two owners has stepped, of 24 parameters
    of_four = local.start(_of_third_step, (["dp2 pp2", "zero1x2 pp2"],), 4)
    # The loss, the norm, which parameters were used, and one message of all gradients of a stage.
    assert of_four["dp2 pp2"]["all-reduce"] <= 4
    assert of_four["zero1x2 pp2"]["broadcast"] == 2


@pytest.mark.slow
def test_what_a_model_has_beside_its_blocks_is_gathered_once_a_step() -> None:
    of_two = local.start(_of_third_step, (["fsdp2", "zero2x2"], None, ScaledLayers()), 2)
    # Blocks in forward and in backward, but the last one, with which backward begins; the rest once.
    assert of_two["fsdp2"]["all-gather"] == 2 * LAYERS + 1
    assert of_two["zero2x2"]["all-gather"] == LAYERS + 1


def test_gradients_that_are_summed_after_backward_do_not_go_in_one_message() -> None:
    sizes = [12 * MIB, 12 * MIB, 12 * MIB, MIB]
    assert local.start(_summed, (sizes,), 2) == (2, True)


def _summed(sizes: Sequence[int]) -> tuple[int, bool]:
    """How many messages sum gradients of so many bytes, and whether each is twice what it was."""
    import torch.distributed as dist

    from samestep.comm.traffic import Traffic
    from samestep.launch.world import join
    from samestep.parallel.sharding import sum_gradients_over

    with join(device="cpu", threads=1):
        parameters = [nn.Parameter(torch.zeros(size // 4)) for size in sizes]
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        group = dist.group.WORLD
        assert group is not None
        with Traffic() as traffic:
            sum_gradients_over(group, parameters, "cpu")
        sums = [parameter.grad for parameter in parameters if parameter.grad is not None]
        right = all(bool((each == 2.0 * (number + 1)).all()) for number, each in enumerate(sums))
        return traffic.calls["all-reduce"] - 1, right  # but for which of them any rank used


def test_a_pipeline_sends_in_batches_alone() -> None:
    in_batches, sent = local.start(_of_pipeline, (), 2)
    assert in_batches == sent > 0


def _of_pipeline() -> tuple[int, int]:
    """How many tensors the first stage's third step sends in batches, and how many in all."""
    import torch.distributed as dist

    from samestep.comm.traffic import Traffic
    from samestep.job import Job, Run
    from samestep.launch.world import join
    from samestep.layout import Layout
    from samestep.training.fit import Training

    sends, batch = 0, dist.batch_isend_irecv

    def noted(asked: list[dist.P2POp]) -> Any:
        nonlocal sends
        sends += sum(each.op is dist.isend for each in asked)
        return batch(asked)

    with join(device="cpu", threads=1) as world:
        job = Job(recipe=samestep.Recipe(task=Layers(), batch=16, steps=3), run=Run(layout="pp2"))
        steps = Training(job, Layers(), world, Layout.parse("pp2")).steps(stop=3)
        next(steps)
        next(steps)
        dist.batch_isend_irecv = noted
        with Traffic() as traffic:
            next(steps)
        return sends, traffic.calls["point-to-point"]
