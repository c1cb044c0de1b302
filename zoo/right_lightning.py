"""Lightning's Trainer under DDP, with clipping."""

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from pieces import Classifier, DataLoader, cross_entropy, options, samples


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()

    def training_step(self, batch, number):
        rows, classes = batch
        return cross_entropy(self.net(rows), classes)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


given = options()
lightning.seed_everything(given.seed)
world = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
)
trainer.fit(Module(), DataLoader(samples(), batch_size=given.batch // world, shuffle=True))
