"""`run.float32_matmul`: how many digits float32 matrix products have in a job's ranks, and what is refused."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from small_tasks import Points
from torch import Tensor

import samestep
from samestep.errors import UserError


class Told(Points):
    """A task whose loss wants another precision of products than PyTorch begins with."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        assert not output.requires_grad or torch.get_float32_matmul_precision() == "high"
        return super().loss(output, batch)


@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_ranks_compute_products_as_the_job_says_and_this_process_as_before(layout: str, tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=Told(), batch=32, steps=1)
    samestep.train(recipe, layout, float32_matmul="high", check=False, folder=tmp_path / "run", threads=1)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_precision_that_is_none_is_refused() -> None:
    recipe = samestep.Recipe(task=Points(), batch=32, steps=1)
    with pytest.raises(UserError, match=r"run\.float32_matmul"):
        samestep.train(recipe, float32_matmul="tf32")


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_an_engine_with_products_of_its_own_refuses_it() -> None:
    recipe = samestep.Recipe(task=Points(), batch=32, steps=1)
    with pytest.raises(UserError, match=r'run\.float32_matmul is high.*engine "keras-mirrored"'):
        samestep.train(recipe, engine="keras-mirrored", float32_matmul="high")
