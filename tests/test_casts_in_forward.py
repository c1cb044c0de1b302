"""Models whose forward casts its own modules, as routers of mixtures of experts do."""

from collections.abc import Sequence

import pytest
import torch
from proving import prove
from torch import Tensor, nn

import samestep


class Casting(nn.Module):
    """A block that casts one of its layers before it calls it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.inner, self.router = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        self.router = self.router.to(self.dtype)
        routed = self.router(torch.relu(self.inner(hidden)).to(self.dtype)).to(hidden.dtype)
        return hidden + torch.tanh(routed)


class Net(nn.Module):
    """Blocks between two layers, of which the last one is cast as well where `last` is a dtype."""

    def __init__(self, dtype: torch.dtype, last: torch.dtype | None = None) -> None:
        super().__init__()
        self.last = last
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Casting(dtype) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        if self.last is not None:
            self.head.to(self.last)
        return self.head(hidden.to(self.last)).to(hidden.dtype) if self.last is not None else self.head(hidden)


class Sums(samestep.Task):
    def __init__(self, dtype: torch.dtype, last: torch.dtype | None = None) -> None:
        self.dtype, self.last = dtype, last

    def model(self) -> nn.Module:
        return Net(self.dtype, self.last)

    def train_set(self) -> list[tuple[Tensor, Tensor]]:
        values = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return [(row, row.sum()[None]) for row in values]

    def eval_set(self) -> list[tuple[Tensor, Tensor]]:
        return self.train_set()[:8]

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> samestep.Batch:
        return samestep.Batch(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return (output - batch.targets).square().sum(), len(output)


def recipe(dtype: torch.dtype, last: torch.dtype | None = None) -> samestep.Recipe:
    return samestep.Recipe(task=Sums(dtype, last), batch=8, steps=3, optimizer=samestep.AdamW(lr=1e-2))


@pytest.mark.slow
def test_a_module_cast_to_the_dtype_that_it_has_takes_the_step_of_one_process() -> None:
    """In a proof's float64 the cast to float32 is none either; a copy would have its own values for ever."""
    same = recipe(torch.float32, torch.float32)
    proofs = prove({layout: (same, layout, {}) for layout in ("dp2", "fsdp2", "zero2x2")})
    assert {layout: isinstance(proof, str) or proof.same_step for layout, proof in proofs.items()} == {
        "dp2": True,
        "fsdp2": True,
        "zero2x2": True,
    }
    assert not [proof for proof in proofs.values() if isinstance(proof, str)]


def test_a_module_cast_to_another_dtype_is_refused_where_its_parameters_are_sharded() -> None:
    lower, head = recipe(torch.bfloat16), recipe(torch.float32, torch.bfloat16)
    cases = {
        "block": (lower, "fsdp2", {}),
        "kept gathered": (lower, "zero2x2", {}),
        "head": (head, "fsdp2", {}),
        "as advised": (lower, "dp2", {}),
        "as advised, with its state sharded": (head, "zero1x2", {}),
    }
    proofs = prove(cases)
    for name, where in {"block": "blocks.0 (Casting)", "kept gathered": "blocks.0 (Casting)", "head": "Net"}.items():
        assert f"the forward of {where} replaces the values of its parameter" in str(proofs[name])
    for name in ("as advised", "as advised, with its state sharded"):
        proof = proofs[name]
        assert not isinstance(proof, str), proof
        assert proof.same_step
