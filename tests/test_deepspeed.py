"""Engine deepspeed: the step of one process at every ZeRO stage, the user's ds_config.json, and its checkpoints."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from proving import prove, same
from small_tasks import Points, Words
from torch import Tensor, nn

import samestep
from samestep import environment
from samestep.cluster.start import local
from samestep.cluster.world import join
from samestep.engines.deepspeed import config as configuration
from samestep.engines.deepspeed.config import Asked
from samestep.engines.resolve import resolve
from samestep.job import Job, Run
from samestep.jobfile import load
from samestep.layout import Layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = (
    "dp2",
    "zero1x2",
    "zero2x2",
    "fsdp2",
    "zero1x2 offload=optimizer",
    "zero2x2 offload=optimizer",
    "fsdp2 offload=optimizer",
    "fsdp2 offload=parameters",
)


def recipe(**values: Any) -> samestep.Recipe:
    settings: dict[str, Any] = {
        "task": Points(),
        "batch": 33,  # uneven over two ranks, and 200 samples are no multiple of it
        "steps": 8,
        "clip": 0.5,
        "optimizer": samestep.AdamW(lr=1e-2),
        "schedule": samestep.Schedule(warmup=2, decay="cosine"),
    }
    return samestep.Recipe(**{**settings, **values})


def written(folder: Path, **config: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_every_stage_takes_the_step_of_one_process() -> None:
    samples, words = recipe(), recipe(task=Words(), batch=13, optimizer=samestep.SGD(lr=0.1, momentum=0.9))
    cases: dict[str, Any] = {layout: (samples, layout, {"engine": "deepspeed"}) for layout in LAYOUTS}
    # Words differ from sample to sample, so the count of terms is known only after all forwards of all ranks; and
    # micro-batches of 3 leave one of 7 samples on one rank and 6 on the other.
    accumulated = {"engine": "deepspeed", "micro_batch": 3}
    cases |= {f"{layout} of words": (words, layout, accumulated) for layout in LAYOUTS}
    # Nobody asks for clipping, and the norm is above DeepSpeed's default, by which it would clip.
    steep = recipe(task=Steep(), clip=None, optimizer=samestep.SGD(lr=0.01))
    cases |= {f"{layout} unclipped": (steep, layout, {"engine": "deepspeed"}) for layout in ("dp2", "zero2x2")}
    proofs = prove(cases)
    assert same(proofs, list(cases)) == {}


class Steep(Points):
    """Gradients with a norm far above 1."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        loss, count = super().loss(output, batch)
        return 50 * loss, count


def test_one_process_takes_it_too() -> None:
    proof = samestep.verify(recipe(), engine="deepspeed", micro_batch=5, device="cpu")
    assert proof.same_step, proof


class HalfUsed(Points):
    """A layer that no sample uses."""

    def model(self) -> nn.Module:
        return Half(self.classes)


class Half(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, classes), nn.Linear(4, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.used(points)


class OneSided(Points):
    """A layer that one rank's samples use, and the other's do not."""

    def model(self) -> nn.Module:
        return Sided(self.classes)


class Sided(Half):
    def forward(self, points: Tensor) -> Tensor:
        used = self.used(points)
        return used + self.unused(points) if self.training and dist.get_rank() == 1 else used


@pytest.mark.timeout(90)
def test_unused_parameters_keep_their_values_or_are_refused() -> None:
    half = recipe(task=HalfUsed(), optimizer=samestep.AdamW(lr=1e-2, weight_decay=0.1))
    sided = recipe(task=OneSided())
    cases: dict[str, Any] = {layout: (half, layout, {"engine": "deepspeed"}) for layout in ("dp2", "zero2x2")}
    sides = ("zero1x2", "zero2x2")
    apart = {"engine": "deepspeed", "micro_batch": 5}
    cases |= {f"{layout}, one rank": (sided, layout, apart) for layout in (*sides, "fsdp2")}
    proofs = prove(cases)
    assert same(proofs, ["dp2"]) == {}
    assert "4 parameters (counted over all ranks) unused" in str(proofs["zero2x2"])
    for layout in sides:
        assert "used parameters that others' did not (unused.bias, unused.weight)" in str(
            proofs[f"{layout}, one rank"]
        )
    assert "runs unused where other ranks did not" in str(proofs["fsdp2, one rank"]) or "a forward ends" in str(
        proofs["fsdp2, one rank"]
    )


class LateSided(Points):
    """The same, from the third forward on."""

    def model(self) -> nn.Module:
        return Later(self.classes)


class Later(Half):
    forwards = 0

    def forward(self, points: Tensor) -> Tensor:
        self.forwards += self.training
        both = self.used(points) + self.unused(points)
        return both + self.used(points) if self.forwards > 2 and dist.get_rank() == 1 else both


@pytest.mark.timeout(60)
def test_a_forward_that_would_wait_for_ever_ends(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match="a forward runs used where the first forward did not"):
        samestep.train(recipe(task=LateSided()), "fsdp2", engine="deepspeed", device="cpu", folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp2 fsdp2", 'DeepSpeed shards over all ranks; "fsdp4" would do'),
        ("dp2 offload=optimizer", "from ZeRO 1 on; zero1x2 offload=optimizer would do"),
        ("zero2x2 offload=parameters", "at ZeRO 3 alone; fsdp2 offload=parameters would do"),
        ("zero1x2 offload=optimizer-disk", "to disk at ZeRO 3 alone; fsdp2 offload=optimizer-disk would do"),
        ("fsdp2 offload=parameters-disk", 'engine "deepspeed" has no offload=parameters-disk yet'),
        ("tp2", 'engine "deepspeed" does not split tensor yet'),
    ],
)
def test_layouts_that_it_does_not_have_are_refused(layout: str, message: str) -> None:
    with pytest.raises(samestep.LayoutError, match="(?s)" + message.replace("(", r"\(")):
        samestep.train(recipe(), layout=layout, engine="deepspeed")


def settled(folder: Path, layout: str = "dp2", *, micro_batch: int | None = None, **values: Any) -> Any:
    """The job and the layout, as a configuration (`config`) completes them."""
    path = written(folder, **values.pop("config"))
    run = Run(layout=layout, engine="deepspeed", engine_config=path, micro_batch=micro_batch)
    plain = {"task": Points(), "batch": 32, **values}
    return resolve("deepspeed").settle(Job(recipe=samestep.Recipe(**plain), run=run), Layout.parse(layout))


def test_a_configuration_says_what_the_job_leaves_open(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.7,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.3}},
    }
    job, layout = settled(tmp_path, config=config)
    assert str(layout) == job.run.layout == "zero2x2"
    assert job.run.micro_batch == 4
    assert (job.recipe.clip, job.recipe.precision) == (0.7, "bf16")
    assert job.recipe.optimizer == samestep.AdamW(lr=0.02, weight_decay=0.3, decay_all=True)


def test_values_left_auto_are_the_jobs(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.3}},
    }
    mine = samestep.AdamW(lr=0.5, weight_decay=0.3)
    job, layout = settled(tmp_path, "zero1x2", config=config, clip=0.2, optimizer=mine, micro_batch=8)
    assert (str(layout), job.recipe.optimizer, job.recipe.clip) == ("zero1x2", mine, 0.2)
    asked = Asked(ranks=2, stage=1, batch=32, micro_batch=8, clip=0.2, precision="bf16")
    done = configuration.completed(config, asked, on_cpu=True)
    assert done["zero_optimization"] == {"stage": 1}
    assert done["gradient_clipping"] == 0.2
    assert done["bf16"] == {"enabled": True}
    assert "optimizer" not in done
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [done[name] for name in sizes] == [32, 8, 2]


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            {},
            r"train_batch_size 32, which is not 4 .* x 3 .* x 2 \(ranks\) = 24",
        ),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, {}, "does not divide; 24 or 32 would do"),
        ({"train_batch_size": 64}, {}, "recipe.batch is 32 .* batches of 64; recipe.batch: 64 would do"),
        ({"train_micro_batch_size_per_gpu": 0}, {}, "train_micro_batch_size_per_gpu 0; it must be a whole number"),
        ({"zero_optimization": {"stage": 4}}, {}, "zero_optimization.stage 4; it can be 0, 1, 2 or 3"),
        ({"zero_optimization": 2}, {}, "zero_optimization is 2; DeepSpeed wants an object"),
        ({"zero_optimization": {"stage": 2}}, {"layout": "fsdp2"}, "ZeRO stage.: 3 here and 2 there"),
        (
            {"gradient_clipping": 1.0, "bf16": {"enabled": True}},
            {"clip": 0.5, "precision": "fp16"},
            "recipe.clip: 0.5 here and 1.0 there; recipe.precision: fp16 here and bf16 there",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "enables fp16 and bf16"),
        (
            {"optimizer": {"type": "Lamb", "params": {}}},
            {"optimizer": samestep.SGD()},
            "recipe.optimizer is .* leave one of them out",
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}},
            {},
            "samestep fills for an optimizer that recipes have alone, and optimizer Lamb is none",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {}}},
            {"schedule": samestep.Schedule(warmup=3)},
            "a scheduler and the recipe a schedule",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}},
            {"layout": "zero1x2 offload=optimizer"},
            "offload of the optimizer.: cpu here and none there",
        ),
    ],
)
def test_a_wrong_configuration_is_explained(
    config: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(samestep.UserError, match=message):
        settled(tmp_path, config=config, **values)


@pytest.mark.parametrize(("text", "message"), [("{", "can't be read as JSON"), ("[]", "holds a list")])
def test_a_file_that_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(), engine="deepspeed", engine_config=path)


def test_a_configuration_is_proved(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=0.5,
        zero_optimization={"stage": 1},
        optimizer={"type": "AdamW", "params": {"lr": 0.01}},
    )
    asked = samestep.Recipe(task=Points(), batch=33, steps=8)
    proof = samestep.verify(asked, layout="dp2", engine="deepspeed", engine_config=path, device="cpu")
    assert (proof.layout, proof.same_step) == ("zero1x2", True), proof


def test_adam_without_decay_is_adamw(tmp_path: Path) -> None:
    # Two decays of one name, and the defaults of two packages: the reference takes those that DeepSpeed takes.
    params = {"lr": 0.01, "adam_w_mode": False}
    path = written(tmp_path, optimizer={"type": "Adam", "params": params})
    asked = samestep.Recipe(task=Points(), batch=33, steps=8)
    run: dict[str, Any] = {"engine": "deepspeed", "engine_config": path, "device": "cpu"}
    assert samestep.verify(asked, **run).same_step
    path = written(tmp_path, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.3}})
    assert samestep.verify(asked, **run).same_step


@pytest.mark.parametrize(
    ("kind", "params", "what"),
    [
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.3}, "Adam with adam_w_mode false and weight_decay 0.3"),
        ("SGD", {"lr": 0.1, "dampening": 0.5}, "SGD with dampening 0.5"),
        ("Adagrad", {"lr": 0.1}, "optimizer Adagrad"),
    ],
)
def test_an_optimizer_that_recipes_do_not_have_is_not_proved(
    kind: str, params: dict[str, Any], what: str, tmp_path: Path
) -> None:
    path = written(tmp_path, optimizer={"type": kind, "params": params})
    with pytest.raises(samestep.UserError, match=f"has {what}, .* there is no reference to hold it against"):
        samestep.verify(samestep.Recipe(task=Points(), batch=33), engine="deepspeed", engine_config=path)


def test_the_example_is_one() -> None:
    job = load(ROOT / "examples/deepspeed/digits.yaml").job
    job, layout = resolve("deepspeed").settle(job, Layout.parse(job.run.layout))
    assert (str(layout), job.recipe.clip, job.run.micro_batch) == ("zero2x2", 1.0, 8)


def test_low_precision_its_scheduler_and_its_tensorboard(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        bf16={"enabled": True},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02, "warmup_type": "linear"},
        },
        tensorboard={"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "points"},
    )
    asked = samestep.Recipe(task=Points(), batch=40, epochs=6, optimizer=samestep.AdamW(lr=0.02))
    result = samestep.train(
        asked, "dp2", engine="deepspeed", engine_config=path, micro_batch=7, device="cpu", folder=tmp_path / "run"
    )
    assert result.losses[-1] < 0.9 * result.losses[0]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    # Three micro-batches on each of two ranks, and the rate moves once a step. DeepSpeed counts from the second one.
    assert rates[:8] == pytest.approx([0.02 * min(1, max(0, step - 1) / 4) for step in range(8)])
    assert any((tmp_path / "board").rglob("events.out.tfevents*"))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_scaled_loss_moves_the_parameters_as_far(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch computes in float16 on every CPU, only slowly; DeepSpeed asks for a fast one.
    with environment.deepspeed_settings("cpu", 0):
        accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(type(accelerator), "is_fp16_supported", lambda self: True)
    path = written(tmp_path, fp16={"enabled": True, "initial_scale_power": 7}, zero_optimization={"stage": stage})
    task, moved = Points(), {}
    runs: list[tuple[Any, Path | None]] = [("fp32", None), ("fp16", path)]
    for precision, config in runs:
        with samestep.session(
            "single", engine="deepspeed", precision=precision, engine_config=config, device="cpu"
        ) as session:
            torch.manual_seed(0)
            model = task.model()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            for batch in session.batches(task.train_set(), batch=33, collate=task.collate, steps=2):
                session.step(batch, task.loss)
            after = session.trainer.state()
            moved[precision] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert torch.dist(moved["fp16"], moved["fp32"]) < 0.02 * moved["fp32"].norm()


def steps(layout: str, folder: str, *, again: bool) -> tuple[list[float], Any]:
    """Losses of steps 3 to 5, without a stop or from the checkpoint after step 2; and what came with it."""
    task, losses, seen = Points(), list[float](), None
    with samestep.session(layout, engine="deepspeed", device="cpu", threads=1) as session:
        torch.manual_seed(int(again))
        model = task.model()
        session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        trainer: Any = session.trainer
        if again:
            seen = trainer.load_checkpoint(folder)["seen"]
        for batch in session.batches(task.train_set(), batch=33, collate=task.collate, steps=6, start=3 * again):
            losses.append(session.step(batch, task.loss).loss.item())
            if batch.step == 2:
                trainer.save_checkpoint(folder, client_state={"seen": 99})
    return losses[-3:], seen


def around_checkpoints(layouts: list[str], folder: Path) -> dict[str, Any]:
    with join(device="cpu", threads=1):
        return {each: [steps(each, str(folder / each), again=again) for again in (False, True)] for each in layouts}


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    layouts = ["dp2", "zero1x2", "zero2x2", "fsdp2"]
    found = local.start(around_checkpoints, (layouts, tmp_path), 2)
    for layout in layouts:
        (losses, _), (resumed, seen) = found[layout]
        assert resumed == pytest.approx(losses, rel=1e-6), layout
        assert seen == 99


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with samestep.session("single", engine="deepspeed", device="cpu") as session:
        model = Points().model()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trainer: Any = session.trainer
        with pytest.raises(samestep.UserError, match="holds no DeepSpeed checkpoint"):
            trainer.load_checkpoint(tmp_path)


def test_shards_are_what_a_rank_holds() -> None:
    ranks = samestep.dry_run(recipe(), layout="fsdp2", engine="deepspeed", device="cpu")
    whole = 12 * sum(parameter.numel() for parameter in Points().model().parameters())  # with Adam's averages
    # Shards are padded.
    assert all(0.5 <= (rank.parameters + rank.optimizer_state) / whole < 0.6 for rank in ranks)
