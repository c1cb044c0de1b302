"""A proof's one process is held against the model as its task built it, and says where values are not finite."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from casting_tasks import AllComplex, Decoder, Filters
from proving import prove, prove_alone
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.cli.main import main
from samestep.data.order import SampleOrder
from samestep.display.proofs import print_proof
from samestep.engines.native.trainer import NativeTrainer
from samestep.training import as_built, session
from samestep.training.as_built import FirstStep
from samestep.training.nonfinite_values import first_metric
from samestep.verification.proof import Proof, as_real


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    settings = {"batch": 10, "steps": 4, "clip": 0.1, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=task, **{**settings, **values})


@pytest.mark.parametrize("task", [Points(), Filters(), AllComplex(), Decoder(kind="gemma")], ids=lambda task: "")
def test_the_first_step_is_that_of_the_model_as_built(task: samestep.Task) -> None:
    proof = prove_alone(recipe(task), steps=1)
    assert proof.same_step, proof
    assert proof.as_built is not None
    assert proof.as_built.not_compared is None
    assert set(proof.as_built.max_relative_difference) == {"loss", "grad_norm", "gradients"}
    assert max(proof.as_built.max_relative_difference.values()) < 1e-5
    assert proof.as_built.tolerance < 1e-3
    assert "one process takes the first step of the model as it was built" in proof.words()[-1]


def test_a_part_that_both_sides_lose_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lossy(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        model._apply(lambda tensor: tensor.real.to(dtype) if tensor.is_complex() else tensor.to(dtype))

    monkeypatch.setattr(session, "move", lossy)
    # Of complex weights that a real number would do for the model does not notice.
    proof = prove_alone(recipe(Multiplied()), steps=2)
    assert max(proof.max_relative_difference.values()) == 0
    assert not proof.same_step
    assert proof.as_built is not None
    assert "does NOT take the first step of the model as it was built: the gradient of 0.weight" in proof.words()[0]
    written = json.loads(json.dumps(proof.to_json(), allow_nan=False))
    assert written["as_built"]["same"] is False
    assert written["as_built"]["max_relative_difference"]["gradients"] is None  # of another shape


class Multiply(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs()


class Multiplied(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(Multiply(), nn.Linear(4, self.classes))


def test_a_gradient_that_both_sides_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = NativeTrainer.gradient_scale
    monkeypatch.setattr(NativeTrainer, "gradient_scale", lambda self, batch: 1.01 * scale(self, batch))
    proof = prove_alone(recipe(Points()), steps=2)
    assert max(proof.max_relative_difference.values()) == 0
    assert not proof.same_step
    assert proof.as_built is not None
    assert proof.as_built.max_relative_difference["grad_norm"] == pytest.approx(0.01, rel=1e-3)


class Spectral(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 16)), nn.Linear(16, self.classes))


def test_buffers_that_a_forward_moves_are_not_taken_for_rounding() -> None:
    proof = prove_alone(recipe(Spectral()), steps=1)
    assert proof.as_built is not None
    assert proof.as_built.same
    assert proof.as_built.tolerance < 1e-3


class Orthogonal(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 16)), nn.Linear(16, self.classes))


def test_signs_that_are_truncated_are_not_taken_for_rounding() -> None:
    proof = prove_alone(recipe(Orthogonal()), steps=1)
    assert proof.as_built is not None
    assert proof.as_built.not_compared is None
    assert proof.as_built.same
    assert proof.as_built.tolerance < 1e-3


class Kinked(nn.Module):
    """One of 16 channels is open by 7e-9, which float32 rounds to zero: it has a gradient in float64 alone."""

    def __init__(self, channel: int) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.tensor([0.1, 0.2]).repeat(16, 1))  # [channels, 2]
        self.limit = nn.Parameter(torch.full((16,), 0.5))
        with torch.no_grad():
            self.limit[channel] = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + (self.limit - (self.parts[:, 0] + self.parts[:, 1])).relu())


class NearKink(Points):
    channel = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Kinked(self.channel), nn.Linear(16, self.classes))


@pytest.mark.parametrize("channel", range(4))
def test_a_kink_that_rounding_crosses_is_not_taken_for_a_fault(channel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NearKink, "channel", channel)
    proof = prove_alone(recipe(NearKink()), steps=1)
    assert proof.same_step, proof
    assert proof.as_built is not None
    assert proof.as_built.not_compared is None


class Sine(nn.Module):
    def __init__(self, times: float = 1e6) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return (self.times * x).sin()


class Chaotic(Points):
    """A model that makes a difference of a tenth of rounding."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Sine(), nn.Linear(16, self.classes))


def test_a_model_that_amplifies_rounding_is_compared_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "one process takes the first step of the model as it was built"
        in prove_alone(recipe(Chaotic()), steps=1).words()[-1]
    )

    def without_float64(**_: bool) -> None:
        raise NotImplementedError

    monkeypatch.setattr(as_built, "in_float64", without_float64)
    assert "which would hide any fault" in prove_alone(recipe(Chaotic()), steps=1).words()[-1]


class ChaoticInFloat64(Points):
    """A model that makes a difference of a hundredth of float64's rounding."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), Sine(2e12), nn.Linear(16, self.classes))


def other_order(task: Points, times: float = 1.0) -> FirstStep:
    """The step of the first batch in float64 by PyTorch alone, its rows added in another order."""
    pairs = [task.pairs[index] for index in SampleOrder(size=len(task.pairs), batch=10, seed=0).global_batch(0)]
    pairs.reverse()
    torch.manual_seed(0)
    model = task.model().double()
    output = model(torch.stack([point for point, _ in pairs]).double())
    loss = nn.functional.cross_entropy(output, torch.tensor([label for _, label in pairs]))
    loss.backward()
    gradients = {
        name: parameter.grad * times for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    return FirstStep(loss=loss.item(), grad_norm=norm, gradients=gradients)


def test_rounding_in_float64_that_a_model_amplifies_is_no_fault() -> None:
    task = ChaoticInFloat64()

    def held(first: FirstStep) -> as_built.AsBuilt:
        return as_built.hold_as_built(recipe(task, dropout=False), task, task.pairs, torch.device("cpu"), first)

    right = held(other_order(task))
    assert right.same, right
    assert right.max_relative_difference["gradients"] > 2 * as_built.TOLERANCE
    assert 2 * as_built.TOLERANCE < right.tolerance < 0.1
    assert not held(other_order(task, times=1.1)).same


class Draw(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand(()) if self.training else x


class Noisy(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(Draw(), super().model())


class Halved(Points):
    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output.bfloat16().float(), batch)


@pytest.mark.parametrize(
    ("task", "values", "reason"),
    [
        (Noisy(), {}, "its forward draws random numbers"),
        (Halved(), {}, "it computes in bfloat16"),
        (Points(dropout=0.1), {"dropout": True}, "dropout drops other elements"),
    ],
    ids=lambda value: "",
)
def test_what_can_not_be_compared_is_said(task: samestep.Task, values: dict[str, Any], reason: str) -> None:
    proof = prove_alone(recipe(task), steps=1, **values)
    assert proof.same_step, proof
    assert reason in proof.words()[-1]


class NotANumber(Points):
    """Something that is not finite in the batch of one sample, which the third step has."""

    def __init__(self, *, where: str) -> None:
        super().__init__()
        self.where = where
        self.sample = int(SampleOrder(size=len(self.pairs), batch=10, seed=0).global_batch(2)[0])

    def train_set(self) -> samestep.Samples:
        return [(point, torch.tensor([label, number])) for number, (point, label) in enumerate(self.pairs)]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        labels, numbers = batch.targets.unbind(dim=1)
        total, count = super().loss(output, samestep.Batch(None, labels))
        there, whole = bool((numbers == self.sample).any()), len(output) == 10
        if there and (self.where == "loss" or (self.where == "loss of one process" and whole)):
            total = total * (math.nan if self.where == "loss" else math.inf)
        if there and self.where == "gradient under the layout" and not whole:
            total = total + (output[0, 0] * 0).abs().sqrt()  # whose derivative at 0 is infinite, and times 0 NaN
        return total, count

    def eval_set(self) -> None:
        return None

    def metrics(self) -> Any:
        return {}


def test_a_value_that_is_not_finite_is_told_by_name_step_and_side() -> None:
    tasks = ("loss", "loss of one process", "gradient under the layout")
    proofs = prove({where: (recipe(NotANumber(where=where), steps=5), "dp2", {}) for where in tasks}, steps=5)
    words = {name: proof.words()[0] for name, proof in proofs.items() if isinstance(proof, Proof)}
    assert words == {
        "loss": "NaN: the loss of step 2, in one process and under the layout",
        "loss of one process": "infinite: the loss of step 2, in one process alone",
        "gradient under the layout": "NaN: the gradient norm of step 2 (the gradient of 4.bias), under dp2 alone",
    }
    assert not any(proof.same_step for proof in proofs.values() if isinstance(proof, Proof))


def test_a_metric_that_only_one_side_knows_is_told() -> None:
    assert first_metric("dp2", 4, {"recall": {"a": math.nan}}, {"recall": {"a": math.nan}}) is None
    found = first_metric("dp2", 4, {"recall": {"a": [1.0, math.nan]}}, {"recall": {"a": [1.0, 2.0]}})
    assert found is not None
    assert found.words() == "NaN: the metric recall.a[1] after step 4, under dp2 alone"
    found = first_metric("dp2", 4, {"mean": 1.0}, {"mean": -math.inf})
    assert found is not None
    assert found.words() == "infinite: the metric mean after step 4, in one process alone"


def test_the_table_and_the_file_say_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proof = prove_alone(recipe(NotANumber(where="loss")), steps=4)
    print_proof(proof)
    printed = capsys.readouterr().out
    assert "NaN: the loss of step 2, in one process and under the layout" in printed
    assert re.search(r"^NaN: \S+ does NOT take the same step as one process$", printed, re.MULTILINE)
    written = json.loads(json.dumps(proof.to_json(), allow_nan=False))
    assert (written["nonfinite"][0]["what"], written["nonfinite"][0]["side"]) == ("loss", "both")
    job = tmp_path / "job.yaml"
    task = f"{Path(__file__)}:NotANumber"
    job.write_text(f"recipe: {{task: '{task}', args: {{where: loss}}, batch: 10, steps: 4}}", encoding="utf-8")
    assert main(["verify", str(job), "--layouts", "recompute=full", "--json", str(tmp_path / "rows.json")]) == 1
    (row,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert row["verdict"] == "NaN"
    assert "NaN: job: NaN: the loss of step 2" in capsys.readouterr().out


def test_complex_numbers_are_compared_as_pairs() -> None:
    assert as_real(torch.tensor([1 + 2j])).tolist() == [[1, 2]]
    assert as_real(torch.tensor([1.0])).tolist() == [1]
