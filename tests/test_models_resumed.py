"""Models of the table in docs/models.md, as they come: trained, saved, and resumed under another layout."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from model_table.entry import task_of
from model_table.zoo import entry_of
from safetensors.torch import load_file

import samestep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the libraries' own
]

SAVED_AT = 2


@pytest.mark.parametrize(
    ("name", "library", "first", "then"),
    [
        ("granite", "transformers", "fsdp2", "tp2"),
        ("diffusers-unet", "diffusers", "pp2", "fsdp2"),
        ("timm-vit", "timm", "tp2", "zero1x2"),
        ("x-transformers", "x_transformers", "dp2", "cp2"),
    ],
)
def test_a_training_goes_on_under_another_layout(
    name: str, library: str, first: str, then: str, tmp_path: Path
) -> None:
    """After a resume the losses and the weights are those of one process that was never interrupted."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    entry = entry_of(name)

    def train(layout: str, folder: str, resume: str = "never") -> samestep.TrainResult:
        optimizer = samestep.SGD(lr=0.01, momentum=0.9)
        recipe = samestep.Recipe(task=task_of(entry), batch=6, steps=2 * SAVED_AT, optimizer=optimizer)
        saving = samestep.Checkpointing(every=SAVED_AT, resume=resume)
        return samestep.train(
            recipe, layout=layout, device="cpu", threads=1, folder=tmp_path / folder, checkpoint=saving
        )

    whole = train("single", "whole")
    saved = train(first, "first")
    rest = train(then, "rest", str(saved.folder / "checkpoints" / f"step-{SAVED_AT}"))
    assert rest.first_step == SAVED_AT
    assert saved.losses == pytest.approx(whole.losses, rel=1e-5)
    assert rest.losses[-SAVED_AT:] == pytest.approx(whole.losses[-SAVED_AT:], rel=1e-5)
    weights, expected = load_file(rest.model_file), load_file(whole.model_file)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            weights[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
