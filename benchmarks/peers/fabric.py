"""Trains a job with Lightning Fabric, as its users write it: in one process, or in ranks that torchrun starts.

pip install lightning -c constraints.txt
torchrun --nproc-per-node=2 benchmarks/peers/fabric.py examples/reviews.yaml --folder runs/fabric
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
from lightning.fabric.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]

from benchmarks.peers.job import PeerJob, arguments
from samestep import environment
from samestep.data.types import Batch
from samestep.jobfile import load
from samestep.tasks.base import call


def launched(job: PeerJob, devices: int, nodes: int) -> Any:
    """Launch Fabric on the existing ranks."""
    fabric = Fabric(
        devices=devices,
        num_nodes=nodes,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if job.place.of > 1 else "auto",
        precision="bf16-mixed" if job.recipe.precision == "bf16" else "32-true",
    )
    fabric.launch()
    return fabric


def step_of(job: PeerJob, fabric: Any) -> Callable[[Any], Any]:
    """The function that takes a step with a batch and returns the gradient norm."""
    model, optimizer = fabric.setup(job.model, job.optimizer)

    def step(pair: Any) -> Any:
        batch, samples = Batch(*pair), job.global_samples(len(job.losses))
        with fabric.autocast():
            loss, terms = job.task.loss(call(model, batch.inputs), batch)
        count = job.count(terms, batch, samples)
        job.send_loss(loss)
        optimizer.zero_grad()
        fabric.backward(loss * job.place.of / count)  # averaged over ranks: the sum over the global batch / its terms
        norm = fabric.clip_gradients(model, optimizer, max_norm=job.recipe.clip or float("inf"))
        optimizer.step()
        job.schedule.step()
        job.note_loss(count)
        return norm

    return step


def main() -> None:
    file, folder = arguments(__doc__)
    ranks = environment.ranks()
    processes = ranks.world_size if ranks else 1
    devices = ranks.local_world_size if ranks else 1
    job = PeerJob(load(file).job.recipe, ranks.rank if ranks else 0, processes)
    fabric = launched(job, devices, processes // devices)
    step = step_of(job, fabric)
    loader = fabric.setup_dataloaders(job.loader(), use_distributed_sampler=False)
    job.begin()
    for pair in loader:
        step(pair)
    job.finish()
    metrics = job.evaluate(job.model, fabric.device, fabric.autocast)
    job.write(folder, engine="fabric", metrics=metrics, device=fabric.device)


if __name__ == "__main__":
    main()
