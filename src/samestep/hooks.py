"""Hooks: a user's own code that is told of steps, evaluations, checkpoints and the end, and may ask for some.

Each rank makes the hooks of `run.hooks`, and calls them with the same values. So what they ask for is the same on all
ranks, as long as it follows from what they are told; where it isn't, the training ends with a message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Began:
    """A training that is about to take its first step here."""

    folder: Path  # of the run
    layout: str
    rank: int
    world_size: int
    first_step: int  # above 0 after a resume
    total_steps: int


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step that was taken. Losses and norms are those of the global batch, the same on every rank."""

    step: int  # counted from 0
    epoch: int
    loss: float
    grad_norm: float  # before clipping
    lr: float
    samples: int  # of the global batch
    losses: Mapping[str, float]  # the loss's terms by name, if it has several
    seconds: float  # of this rank, with those that it waited for others


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """An evaluation of the held-out samples after `step` steps."""

    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint whose writing has begun, after `step` steps."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training after its last step, with the last evaluation."""

    step: int
    metrics: Mapping[str, Any]
    stopped_early: str | None  # the reason


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a hook asks for. It is done after the step that is being computed when the hook returns it."""

    stop: str | None = None  # the reason, which the report has; then follows what follows the last step
    save: bool = False  # a checkpoint, where the job saves any
    evaluate: bool = False
    log: Mapping[str, float] = field(default_factory=dict)  # further numbers, which rank 0 sends to the loggers


class Hooks:
    """Base class of hooks; each method may be left out. What they are given is for reading."""

    def on_begin(self, began: Began) -> None:
        """Before the first step."""

    def on_step(self, stepped: Stepped) -> Ask | None:
        """After each step, while the next one is computed: values of a step are read one step late."""

    def on_evaluation(self, evaluated: Evaluated) -> Ask | None:
        """After each evaluation."""

    def on_checkpoint(self, saved: Saved) -> None:
        """When a checkpoint's state has been copied; its files are written in the background."""

    def on_end(self, ended: Ended) -> None:
        """After the last step and the last evaluation."""
