"""Spot checks as callbacks of transformers' Trainer and of Lightning, whose classes are imported when asked for."""

from pathlib import Path
from typing import Any

from samestep.spot_checks.recorder import Reduction, SpotChecks


def trainer_callback(folder: str | Path, *, every: int = 100, reduction: Reduction = "mean") -> Any:
    """A callback for `Trainer(callbacks=[...])`, and for trainers derived from it, such as TRL's.

    Args:
        folder, every, reduction: as of `SpotChecks`.
    """
    from transformers import TrainerCallback

    class SpotChecksCallback(TrainerCallback):
        """Records from the beginning of the training to its end."""

        _checks: SpotChecks | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            model, optimizer = objects["model"], objects["optimizer"]
            self._checks = SpotChecks(folder, model, optimizer, every=every, reduction=reduction)

        def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if self._checks is not None:
                self._checks.close()

    return SpotChecksCallback()


def lightning_callback(folder: str | Path, *, every: int = 100, reduction: Reduction = "mean") -> Any:
    """A callback for Lightning's `Trainer(callbacks=[...])`; of several optimizers each has a folder of its own.

    Args:
        folder, every, reduction: as of `SpotChecks`.
    """
    from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]

    class SpotChecksCallback(Callback):
        """Records from the beginning of the fit to its end."""

        def __init__(self) -> None:
            self._checks: list[SpotChecks] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            several = len(trainer.optimizers) > 1
            self._checks = [
                SpotChecks(
                    Path(folder) / str(number) if several else folder,
                    pl_module,
                    optimizer,
                    every=every,
                    scaler=scaler,
                    reduction=reduction,
                )
                for number, optimizer in enumerate(trainer.optimizers)
            ]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            for checks in self._checks:
                checks.close()

    return SpotChecksCallback()
