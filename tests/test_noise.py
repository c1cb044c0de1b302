"""Rounding that a model amplifies is no difference of a layout; a mistake in such a model is found all the same."""

from pathlib import Path

import mistakes
import pytest
import torch
import torch.distributed as dist
from mistakes import Native
from proving import Proof, prove
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.data.loader import StepBatch
from samestep.engines.native.trainer import NativeTrainer
from samestep.job import Job, Run
from samestep.training.last_bits import LastBitsChanged
from samestep.verification import noise
from samestep.verification.noise import Noise, NoiseFound, NoiseMeasurement, judge
from samestep.verification.proof import Reference
from samestep.verification.tensors import TOLERANCE


class Cancelling(nn.Module):
    """Numbers that agree in their first digits, whose differences a batch norm spreads."""

    def __init__(self, classes: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.first, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16, eps=1e-30)
        self.last = nn.Linear(16, classes)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(0.7 + self.share * self.first(input))))


class CancellingPoints(Points):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def model(self) -> nn.Module:
        return Cancelling(self.classes, self.share)


class ScaledTrainer(NativeTrainer):
    def gradient_scale(self, batch: StepBatch) -> float:
        return super().gradient_scale(batch) * 1.001


class Scaled(Native):
    """Gradients that are a thousandth too large."""

    trainer_class = ScaledTrainer


class DroppedTrainer(NativeTrainer):
    def gradient_scale(self, batch: StepBatch) -> float:
        return super().gradient_scale(batch) * (dist.get_rank() == 0)


class Dropped(Native):
    """The gradients of rank 1's samples are lost."""

    trainer_class = DroppedTrainer


def recipe(share: float) -> samestep.Recipe:
    optimizer = samestep.SGD(lr=0.05, momentum=0.9)
    schedule = samestep.Schedule(warmup=0.3, decay="linear")  # which one of the mistakes forgets
    # Eleven samples: halves of ten have the mean of their means.
    return samestep.Recipe(task=CancellingPoints(share), batch=11, steps=4, optimizer=optimizer, schedule=schedule)


def test_amplified_rounding_passes_and_mistakes_do_not() -> None:
    planted = (*mistakes.CLASSIC, Scaled, Dropped)
    some, much = recipe(2e-8), recipe(1e-10)
    proofs = prove(
        {
            **{engine.__name__: (some, "dp2", {"engine": engine()}) for engine in planted},
            "too much": (much, "dp2", {"engine": Native()}),
            "right": (some, "dp2", {"engine": Native()}),
        },
        steps=3,
    )
    right, blunt = proofs["right"], proofs["too much"]
    assert isinstance(right, Proof)
    assert max(right.max_relative_difference.values()) > 3 * TOLERANCE
    assert right.same_step, right.words()
    assert "this model amplifies rounding" in " ".join(right.words())
    assert isinstance(blunt, Proof)
    assert (blunt.same_step, blunt.undecided) == (False, True), blunt.words()
    assert blunt.verdict == "can't tell whether it is the same step"
    for engine in planted:
        proof = proofs[engine.__name__]
        assert isinstance(proof, Proof), proof
        assert not proof.same_step, engine
        assert proof.noise is not None
        assert proof.noise.verdict == "more than rounding", (engine, proof.noise)


def test_what_is_above_its_noise_is_named_whatever_else_is_rounding() -> None:
    measured = Noise(quantities={"loss": 1e-12, "grad_norm": 1e-9}, tensors={"a": 1e-9, "b": 1e-12, "c": 1e-6})
    assert judge({"loss": 1e-11, "grad_norm": 5e-9, "a": 4e-9}, measured, 1e-10, 3).verdict == "rounding"
    found = judge({"loss": 3e-10, "grad_norm": 5e-9, "a": 4e-9}, measured, 1e-10, 3)
    assert (found.verdict, found.where) == ("more than rounding", "loss")
    assert judge({"b": 3e-8}, measured, 1e-10, 3).verdict == "more than rounding"  # the median's noise is its least
    found = judge({"a": 4e-9, "c": 2e-7}, measured, 1e-10, 3)
    assert (found.verdict, found.where) == ("can't tell", "c")
    assert "with fewer --steps" in found.words()


def test_a_branch_that_rounding_takes_at_times_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def judged(metrics: list[float], loss: float = 0.0) -> NoiseFound:
        measured.clear()

        def measure(*_: object) -> Noise:
            measured.append(metrics[len(measured)])
            return Noise(quantities={"loss": loss, "metrics": measured[-1]}, tensors={})

        monkeypatch.setattr(noise, "_measured", measure)
        job, task = Job(recipe=recipe(1.0), run=Run(device="cpu", threads=1)), CancellingPoints(1.0)
        known = Reference(
            losses=[],
            grad_norms=[],
            parameters=Path(),
            rounding=None,
            most_rounding=0.0,
            metrics={},
            held_out=None,
            buffers={},
        )
        return NoiseMeasurement(job, task, 2, known).judge({"metrics": 0.13, "loss": 1e-12}, 1e-10)

    assert judged([2e-6, 1e-5, 2e-6, 0.134]).verdict == "can't tell"
    assert judged([2e-6] * 8).verdict == "more than rounding"
    assert len(measured) == 8
    assert judged([1e-14] * 8, loss=1e-5).verdict == "more than rounding"
    assert len(measured) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
@pytest.mark.parametrize("bit", [1, 2])
def test_the_last_bit_of_what_is_rounded_is_changed_and_no_more(dtype: torch.dtype, bit: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 3, dtype=dtype, generator=generator).requires_grad_()
    other = torch.randn(3, 5, dtype=dtype, generator=generator)
    whole = torch.arange(6.0).to(dtype)

    def computed() -> list[Tensor]:
        product = values @ other
        total = torch.view_as_real(product).sum() if dtype.is_complex else product.sum()
        (gradient,) = torch.autograd.grad(total, values)
        return [product.detach(), gradient]

    exact = computed()
    with LastBitsChanged(bit):
        changed = computed()
        assert torch.equal(whole * 2 + 1, 2 * whole + 1)
        assert torch.equal(values.clone(), values)
        assert torch.equal(torch.where(values == 0, values[:1], values), values)
    for before, after in zip(exact, changed, strict=True):
        some, others = (torch.view_as_real(each) if dtype.is_complex else each for each in (before, after))
        assert 0.1 < (some != others).double().mean() < 0.9
        assert ((some - others).abs() <= 4 * torch.finfo(some.dtype).eps * some.abs().clamp(min=1)).all()
