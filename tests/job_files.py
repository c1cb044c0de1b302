"""A job file that many tests read, and the message with which one is refused."""

import os
from pathlib import Path

import pytest

from samestep import jobfile
from samestep.errors import UserError

REVIEWS = """\
# a comment
recipe:
  task: text-classification
  data:
    source: reviews
  seed: 3
  batch: 32
  epochs: 2
  optimizer: {name: sgd, lr: 3e-1, momentum: 0.9}
  schedule:
    warmup: 0.1
    decay: linear
run:
  layout: dp2 tp2
  micro_batch: 8
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(file: Path, *overrides: tuple[str, str]) -> str:
    """The message with which a job file is refused, without the folder it stands in."""
    with pytest.raises(UserError) as caught:
        jobfile.load(file, [(key, value, f"--set {key}={value}") for key, value in overrides])
    return str(caught.value).replace(f"{file.parent}{os.sep}", "")
