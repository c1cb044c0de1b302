"""How many messages a step takes: large ones, not one for each parameter."""

from collections.abc import Mapping, Sequence

import torch
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.launch import local

WIDTH, LAYERS = 16, 12


class Layers(Points):
    """As many square layers as make one message a parameter visible."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))

    def train_set(self) -> samestep.Samples:
        vectors = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
        return [(vector, vector) for vector in vectors]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return (output - batch.targets).square().sum(), len(output)


def _of_third_step(layouts: Sequence[str], micro_batch: int | None = None) -> dict[str, Mapping[str, int]]:
    """By layout, how many collectives of each kind this rank's third step has."""
    from samestep.comm.traffic import Traffic
    from samestep.job import Job, Run
    from samestep.launch.world import join
    from samestep.layout import Layout
    from samestep.training.fit import Training

    found: dict[str, Mapping[str, int]] = {}
    with join(device="cpu", threads=1) as world:
        for layout in layouts:
            task = Layers()
            job = Job(
                recipe=samestep.Recipe(task=task, batch=16, steps=4), run=Run(layout=layout, micro_batch=micro_batch)
            )
            steps = Training(job, task, world, Layout.parse(layout)).steps(stop=3)
            next(steps)
            next(steps)
            with Traffic() as traffic:
                next(steps)
            found[layout] = dict(traffic.calls)
    return found


def test_stages_gather_their_shards_once_a_step_under_zero2_and_for_every_micro_batch_under_fsdp() -> None:
    of_four = local.start(_of_third_step, (["zero2x2 pp2", "fsdp2 pp2"], 2), 4)
    micro_batches, units = 4, LAYERS // 2  # of 16 samples on two ranks, two each; of a stage
    assert of_four["zero2x2 pp2"]["all-gather"] == units
    assert of_four["fsdp2 pp2"]["all-gather"] >= 2 * units * micro_batches - 2 * micro_batches  # forward and backward
    assert of_four["zero2x2 pp2"]["reduce-scatter"] == of_four["fsdp2 pp2"]["reduce-scatter"] == units


def test_optimizer_shards_and_replicas_of_stages_send_few_large_messages() -> None:
    of_two = local.start(_of_third_step, (["zero1x2", "dp2"],), 2)
    assert of_two["dp2"]["all-reduce"] == 2  # all gradients; the losses' sum with the flags of used parameters
    assert of_two["zero1x2"]["broadcast"] == 2  # what each of the two owners has stepped, of 24 parameters
    of_four = local.start(_of_third_step, (["dp2 pp2", "zero1x2 pp2"],), 4)
    # The loss, the norm, which parameters were used, and one message of all gradients of a stage.
    assert of_four["dp2 pp2"]["all-reduce"] <= 4
    assert of_four["zero1x2 pp2"]["broadcast"] == 2
