"""Lightning Fabric trains a job, as its users write it: one process, or ranks that torchrun started.

pip install lightning -c constraints.txt
torchrun --nproc-per-node=2 benchmarks/peers/fabric.py examples/reviews.yaml --folder runs/fabric
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

from benchmarks.peers.job import PeerJob, arguments
from samestep import environment
from samestep.tasks.base import Batch, call


def main() -> None:
    file, folder = arguments(__doc__)
    ranks = environment.ranks()
    processes = ranks.world_size if ranks else 1
    job = PeerJob(file, ranks.rank if ranks else 0, processes)
    fabric = Fabric(
        devices=ranks.local_world_size if ranks else 1,
        num_nodes=processes // ranks.local_world_size if ranks else 1,
        strategy="ddp" if processes > 1 else "auto",
        precision="bf16-mixed" if job.recipe.precision == "bf16" else "32-true",
    )
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer)
    loader = fabric.setup_dataloaders(job.loader(), use_distributed_sampler=False)
    job.begin()
    for step, pair in enumerate(loader):
        batch, samples = Batch(*pair), job.global_samples(step)
        with fabric.autocast():
            loss, _ = job.task.loss(call(model, batch.inputs), batch)
        optimizer.zero_grad()
        fabric.backward(loss * processes / samples)  # averaged over ranks: the sum over the global batch / samples
        if job.recipe.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=job.recipe.clip)
        optimizer.step()
        job.schedule.step()
        job.average_loss(loss, samples)
    job.finish()
    metrics = job.evaluate(job.model, fabric.device, fabric.autocast)
    job.write(folder, engine="fabric", metrics=metrics, device=fabric.device)


if __name__ == "__main__":
    main()
