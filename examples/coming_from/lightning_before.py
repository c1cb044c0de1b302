"""python lightning_before.py"""

import lightning  # pyright: ignore[reportMissingImports]
import torch
from small import loss, net, points, tell
from torch.utils.data import DataLoader


class Points(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        inputs, targets = batch
        return loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    module = Points()
    trainer = lightning.Trainer(
        max_epochs=10,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(points(), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        tell(module.net)
