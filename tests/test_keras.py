"""TensorFlow's strategies as engines: the same step from synchronous ones, and learning from the asynchronous one."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import Case, assert_same_steps
from safetensors.torch import load_file
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.data.order import SampleOrder
from samestep.engines.keras import from_torch, parameter_server
from samestep.engines.keras.engine import PACKAGES, start
from samestep.engines.keras.layers import MODULES
from samestep.tasks.image_classification import NORMS, ResNet18
from samestep.tasks.regression import Regression

if any(importlib.util.find_spec(package) is None for package in PACKAGES):
    pytest.skip("TensorFlow or tf_keras is not installed", allow_module_level=True)

# 60 samples in batches of 9: the last one of an epoch holds 6. Replicas and workers take 5 and 4 of 9.
LINE: dict[str, Any] = {"task": "regression", "args": {"samples": 60, "held_out": 20, "features": 3}, "batch": 9}
SGD = samestep.Recipe(
    **LINE,
    steps=7,
    optimizer=samestep.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, decay_all=True),
    schedule=samestep.Schedule(warmup=2, decay="cosine"),
)
PLAIN_SGD = samestep.Recipe(**LINE, steps=3, clip=0.1, optimizer=samestep.SGD(lr=0.05, weight_decay=0.1))
DIGITS: dict[str, Any] = {"task": "image-classification", "data": {"source": "digits", "limit": 43}, "batch": 9}
ADAMW = samestep.Recipe(
    **DIGITS,
    model={"type": "small", "width": 8},
    steps=5,
    clip=0.5,
    optimizer=samestep.AdamW(lr=1e-2, weight_decay=0.1),
)
RESIDUAL = samestep.Recipe(**DIGITS, model={"type": "resnet18", "width": 8}, steps=2)


def names(value: object) -> str:
    """Short names of tests' cases: the modules of a model."""
    parts = list(value) if isinstance(value, nn.Sequential) else [value]
    return "+".join(type(part).__name__ for part in parts) if isinstance(value, nn.Module) else ""


@pytest.mark.parametrize(
    ("recipe", "run", "steps"),
    [
        pytest.param(SGD, {}, 7, id="SGD with momentum"),
        pytest.param(PLAIN_SGD, {"micro_batch": 2}, 3, id="SGD", marks=pytest.mark.slow),
        pytest.param(ADAMW, {"micro_batch": 4}, 2, id="AdamW", marks=pytest.mark.slow),
        pytest.param(ADAMW, {"micro_batch": 4}, 5, id="AdamW, more steps", marks=pytest.mark.slow),
        pytest.param(RESIDUAL, {}, 2, id="ResNet", marks=pytest.mark.slow),
    ],
)
def test_two_replicas_of_one_process_take_the_same_step(
    recipe: samestep.Recipe, run: dict[str, Any], steps: int
) -> None:
    proof = samestep.verify(recipe, engine="keras-mirrored", threads=2, device="cpu", steps=steps, **run)
    assert proof.same_step, proof
    assert proof.dtype == "float64"
    assert proof.max_relative_difference["loss"] < 1e-13


def test_two_workers_take_the_same_step() -> None:
    """Where one has fewer samples than the other, and none at all in a zero-weight micro-batch."""
    engine = {"engine": "keras-multi-worker", "device": "cpu"}
    assert_same_steps([(PLAIN_SGD, "dp2", {**engine, "micro_batch": 4})], steps=7)


@pytest.mark.slow
def test_two_workers_take_the_same_step_with_momentum_and_with_one_sample_at_a_time() -> None:
    engine = {"engine": "keras-multi-worker", "device": "cpu"}
    cases: list[Case] = [(SGD, "dp2", engine), (ADAMW, "dp2", {**engine, "micro_batch": 1})]
    assert_same_steps(cases, steps=7)


@pytest.mark.slow
def test_training_records_what_workers_hold_and_send(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task="regression", batch=65, steps=9, optimizer=samestep.SGD(lr=0.01, momentum=0.9))
    run: dict[str, Any] = {"threads": 1, "device": "cpu"}
    alone = samestep.train(recipe, folder=tmp_path / "alone", **run)
    result = samestep.train(recipe, layout="dp2", engine="keras-multi-worker", folder=tmp_path / "two", **run)
    assert result.losses == pytest.approx(alone.losses, rel=1e-5)
    assert result.metrics == pytest.approx(alone.metrics, rel=1e-5)
    weights, expected = load_file(result.model_file), load_file(alone.model_file)
    assert weights.keys() == expected.keys()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    for usage in result.usage:
        assert usage.parameters == usage.optimizer_state == 4 * 21
        assert usage.gradients == 0
        assert usage.sent == {"all-reduce": 4 * 22}  # a gradient and a loss, 2 (n - 1) / n times


def after_an_update_for_each_part(recipe: samestep.Recipe, parts: int) -> dict[str, Tensor]:
    """The line's parameters after SGD in one process, in float64, with each of a batch's parts as an update.

    A single worker takes the parts in their order, so that no gradient is out of date. A part's rate is its share.
    """
    assert isinstance(recipe.optimizer, samestep.SGD)
    samples = Regression().train_set()
    order = SampleOrder(size=len(samples), batch=recipe.batch, seed=recipe.seed)
    torch.manual_seed(recipe.seed)
    model = Regression().model().double()
    velocity = [torch.zeros_like(each) for each in model.parameters()]
    for step in range(order.steps_per_epoch):
        batch = order.global_batch(step).tolist()
        for part in torch.tensor(batch).tensor_split(min(parts, len(batch))):
            inputs, targets = (
                torch.stack(each).double() for each in zip(*(samples[i] for i in part.tolist()), strict=True)
            )
            gradients = torch.autograd.grad((model(inputs) - targets).square().mean(), [*model.parameters()])
            for parameter, moving, gradient in zip(model.parameters(), velocity, gradients, strict=True):
                moving.mul_(recipe.optimizer.momentum).add_(gradient)
                parameter.data.sub_(moving, alpha=recipe.optimizer.lr * len(part) / len(batch))
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.slow
def test_servers_and_workers_learn_without_waiting(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task="regression", batch=65, epochs=1, optimizer=samestep.SGD(lr=0.01, momentum=0.9))
    run: dict[str, Any] = {"engine": "keras-parameter-server", "micro_batch": 22, "threads": 1, "device": "cpu"}
    result = samestep.train(recipe, layout="dp3", folder=tmp_path, **run)
    expected = after_an_update_for_each_part(recipe, parts=3)
    for name, value in load_file(result.model_file).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-5)  # of float32
    inputs, targets = (torch.stack(each).double() for each in zip(*Regression().eval_set() or (), strict=True))
    squares = (nn.functional.linear(inputs, expected["weight"], expected["bias"]) - targets).square()
    assert result.metrics["mean_squared_error"] == pytest.approx(squares.mean().item(), rel=1e-4)
    assert result.steps == 64
    chief, worker, server = result.usage
    assert [usage.parameters for usage in result.usage] == [84, 84, 168]
    assert [usage.optimizer_state for usage in result.usage] == [0, 0, 84]
    assert worker.sent["point-to-point"] == server.sent["point-to-point"] == 3 * 84  # for three parts
    assert chief.sent["point-to-point"] == 3 * 22 * (20 * 4 + 4 + 8)  # inputs, targets, weights


@pytest.mark.parametrize(
    ("ranks", "counts"), [(3, (1, 1, 1)), (4, (1, 2, 1)), (6, (1, 4, 1)), (7, (1, 4, 2)), (10, (1, 6, 3))]
)
def test_ranks_are_chief_workers_and_servers(ranks: int, counts: tuple[int, int, int]) -> None:
    roles = parameter_server.roles(ranks)
    assert tuple(roles.count(kind) for kind in ("chief", "worker", "ps")) == counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(5, 3), (5,)),
        (nn.Linear(5, 3, bias=False), (4, 5)),
        (nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(approximate="tanh")), (5,)),
        (nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Identity(), nn.Dropout(0.5)), (5,)),
        (nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6)), (5,)),
        (nn.LayerNorm([4, 5]), (4, 5)),
        (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2)), (3, 7, 9)),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding="same", dilation=2), nn.GroupNorm(2, 4)), (3, 7, 9)),
        (nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d((2, 1)), nn.Flatten()), (3, 9, 7)),
        (nn.Sequential(nn.AdaptiveAvgPool2d((2, None)), nn.Flatten(), nn.Linear(42, 2)), (3, 6, 7)),
        (ResNet18(channels=1, classes=3, width=8, norm=NORMS["group"], small_stem=False), (1, 33, 33)),
    ],
    ids=names,
)
def test_a_counterpart_computes_what_the_module_does(model: nn.Module, shape: tuple[int, ...]) -> None:
    model = model.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    given = torch.randn(3, *shape, dtype=torch.float64)
    tools = start("fp64", torch.device("cpu"), replicas=2)
    converted = from_torch.convert(model, tools, given)
    found = torch.from_numpy(converted.model(given.numpy(), training=False).numpy())
    torch.testing.assert_close(found, model(given), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.equal(converted.parameter(name), parameter)


class Other(Regression):
    """Regression with another model, or another loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(samples=20, held_out=0)
        self.net = net

    def model(self) -> nn.Module:
        return self.net


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, given: Tensor) -> Tensor:
        return self.layer(self.layer(given))


class Branches(Twice):
    def forward(self, given: Tensor) -> Tensor:
        return self.layer(given) if given.sum() > 0 else given


class Scaled(Twice):
    def forward(self, given: Tensor) -> Tensor:
        return self.layer(given).cumsum(dim=1)


class Pair(nn.Bilinear):
    def __init__(self) -> None:
        super().__init__(20, 20, 1)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, given: Tensor) -> Tensor:
        return given + self.scale


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 20), nn.Linear(20, 20))
        self[1].weight = self[0].weight


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4)),
            r"1 \(BatchNorm1d\) has no Keras counterpart here; there",
        ),
        (nn.LSTM(20, 4), r"the model \(LSTM\) has no Keras counterpart here; there are .*Linear"),
        (Twice(), "layer is called 2 times in one forward"),
        (Branches(), "forward of Branches can't be followed"),
        (Scaled(), "the model calls cumsum, which has no Keras counterpart"),
        (Pair(), "the model is called with input1, input2; use one tensor"),
        (Bare(), "uses scale outside of a layer"),
        (Tied(), r"0\.weight and 1\.weight are one tied parameter"),
    ],
    ids=names,
)
def test_a_model_without_counterpart_is_refused_before_ranks_start(model: nn.Module, message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(samestep.Recipe(task=Other(model), batch=4), layout="dp2", engine="keras-multi-worker")


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Conv2d(4, 4, 1, groups=2), (4, 5, 5), "neither groups nor"),
        (nn.Conv2d(4, 4, 2, stride=2, dilation=(1, 2)), (4, 5, 5), "a stride or a dilation above 1, not both"),
        (nn.MaxPool2d(2, ceil_mode=True), (4, 5, 5), "neither ceil_mode nor dilation"),
        (nn.AvgPool2d(2, padding=1), (4, 5, 5), "neither ceil_mode nor padding"),
        (nn.AdaptiveAvgPool2d(2), (4, 5, 5), r"\(5, 5\) is no multiple of \(2, 2\)"),
        (nn.Flatten(2), (4, 5, 5), "start_dim=1, end_dim=-1"),
        (nn.Linear(5, 4), (4, 5, 5), "slice images along their width"),
        (nn.LayerNorm(5), (4, 5, 5), "group norm"),
    ],
    ids=names,
)
def test_a_setting_without_counterpart_is_refused(model: nn.Module, shape: tuple[int, ...], message: str) -> None:
    tools = start("fp64", torch.device("cpu"), replicas=2)
    with pytest.raises(samestep.UserError, match=message):
        from_torch.convert(model.double(), tools, torch.zeros(2, *shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("run", "recipe", "message"),
    [
        ({"layout": "dp2"}, {}, 'engine "keras-mirrored" does not split replicate'),
        ({"layout": "fsdp2", "engine": "keras-multi-worker"}, {}, "does not split shard"),
        ({"layout": "recompute=full"}, {}, "no recompute=full"),
        ({}, {"precision": "bf16"}, "precision is bf16, which .* does not have; use fp32, fp64"),
        ({"engine_config": Path("some.json")}, {}, "no configuration file of its own"),
        ({}, {"task": Points(), "args": {}}, "the loss of Points has no TensorFlow counterpart; .* Regression"),
        ({"layout": "dp2", "engine": "keras-parameter-server"}, {}, "a chief, a worker and a server .* dp3 or more"),
    ],
)
def test_what_the_engines_cannot_do_is_refused(run: dict[str, Any], recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(samestep.Recipe(**{**LINE, **recipe}), **{"engine": "keras-mirrored", **run})


def test_there_is_nothing_to_prove_of_an_asynchronous_engine() -> None:
    with pytest.raises(samestep.UserError, match=r"does not take the same step .* samestep train shows"):
        samestep.verify(SGD, layout="dp4", engine="keras-parameter-server")


def test_a_loop_of_ones_own_is_refused() -> None:
    with samestep.session(layout="single", engine="keras-mirrored", device="cpu") as session:
        model = nn.Linear(2, 1)
        with pytest.raises(samestep.UserError, match="a loop of one's own, which would not see it change"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_more_replicas_than_this_process_has_are_refused() -> None:
    tools = start("fp64", torch.device("cpu"), replicas=2)
    assert len(tools.tf.config.list_logical_devices("CPU")) == 2
    with pytest.raises(samestep.UserError, match=r"started in this process with 2 devices, and can't get 3"):
        samestep.verify(SGD, engine="keras-mirrored", threads=3, device="cpu")


def test_every_counterpart_is_in_the_documentation() -> None:
    root = Path(__file__).resolve().parent.parent
    for page in ("docs/engines/keras.md", "docs/zh/engines/keras.md"):
        text = (root / page).read_text(encoding="utf-8")
        assert [kind.__name__ for kind in MODULES if f"`{kind.__name__}`" not in text] == []


@pytest.mark.slow
def test_tensorboard_does_not_load_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from samestep.training.metrics_log import Records\n"
        f"with Records(Path({str(tmp_path)!r}), log=None) as records:\n"
        "    records.evaluation(0, {'accuracy': 1.0})\n"
        "assert 'tensorboard' in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
