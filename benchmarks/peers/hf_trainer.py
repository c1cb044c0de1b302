"""Trains a job with transformers' Trainer: in one process, or in ranks that torchrun starts.

pip install "samestep[accelerate]"
torchrun --nproc-per-node=2 benchmarks/peers/hf_trainer.py examples/reviews.yaml --folder runs/hf-trainer
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from benchmarks.peers.job import PeerJob, arguments
from samestep import environment
from samestep.data.types import Batch
from samestep.jobfile import load
from samestep.tasks.base import call


class JobTrainer(Trainer):
    """A Trainer with a job's batches, in their order, and its loss."""

    def __init__(self, job: PeerJob, **options: Any) -> None:
        self.job = job
        self._count = 1.0
        super().__init__(model=job.model, optimizers=(job.optimizer, job.schedule), **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.job.loader(collate=self._collate)

    def _collate(self, samples: Any) -> dict[str, Any]:
        batch = Batch(*self.job.task.collate(samples))
        return {"inputs": batch.inputs, "targets": batch.targets}

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Tensor:
        samples = self.job.global_samples(len(self.job.losses))
        batch = Batch(inputs["inputs"], inputs["targets"])
        loss, terms = self.job.task.loss(call(model, batch.inputs), batch)
        self._count = self.job.count(terms, batch, samples)
        self.job.send_loss(loss)
        # Averaged over ranks: the sum over the global batch / its terms.
        return loss * self.job.place.of / self._count

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().training_step(*arguments, **options)  # forward and backward
        self.job.note_loss(self._count)
        return loss


def settings_of(job: PeerJob, folder: Path) -> TrainingArguments:
    """The Trainer's arguments, without what is not compared: checkpoints, reports, progress bars."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=job.total_steps,
        max_grad_norm=job.recipe.clip or 0.0,  # 0: none
        bf16=job.recipe.precision == "bf16",
        seed=job.recipe.seed,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.accelerator.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def main() -> None:
    file, folder = arguments(__doc__)
    ranks = environment.ranks()
    job = PeerJob(load(file).job.recipe, ranks.rank if ranks else 0, ranks.world_size if ranks else 1)
    settings = settings_of(job, folder)
    trainer = JobTrainer(job, args=settings, train_dataset=job.samples)
    job.begin()
    trainer.train()
    job.finish()
    metrics = job.evaluate(job.model, settings.device, trainer.autocast_smart_context_manager)
    job.write(folder, engine="hf-trainer", metrics=metrics, device=settings.device)


if __name__ == "__main__":
    main()
