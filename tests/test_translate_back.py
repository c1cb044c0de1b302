"""`samestep translate --to`: what is written for DeepSpeed and accelerate, their readers accept; round trips."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestep.cli.main import main
from samestep.job import Job, Run
from samestep.jobfile import load
from samestep.layout import Layout
from samestep.recipe import SGD, AdamW, Recipe, Schedule
from samestep.training.schedule import rate
from samestep.translate import unsaid

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

sizes = st.sampled_from([1, 2, 3])
rates = st.sampled_from([1e-4, 3e-3, 0.25])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts that both tools can say: replicas or shards, with slices or stages."""
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    data = draw(sizes)
    shards = zero > 0 and data > 1
    choices = ["none"] + ["optimizer"] * shards + ["parameters"] * (shards and zero == 3)
    return Layout(
        shard=data if shards else 1,
        zero=zero if shards else 0,
        replicate=1 if shards else data,
        tensor=draw(sizes),
        recompute=draw(st.sampled_from(["none", "full"])),
        offload=draw(st.sampled_from(choices)),
    )


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    layout = draw(layouts())
    micro = draw(st.sampled_from([1, 3, 4]))
    batch = micro * layout.data_ranks * draw(st.sampled_from([1, 2, 5]))
    steps = draw(st.sampled_from([30, 100]))
    decay = draw(st.sampled_from(["none", "linear", "cosine"]))
    optimizer: dict[str, Any] = {"name": draw(st.sampled_from(["adamw", "sgd"])), "lr": draw(rates)}
    optimizer |= {"weight_decay": draw(st.sampled_from([0.0, 0.1])), "decay_all": True}
    if optimizer["name"] == "adamw":
        optimizer |= {"betas": [0.9, draw(st.sampled_from([0.95, 0.999]))], "eps": 1e-6}
    else:
        optimizer |= {"momentum": 0.9, "nesterov": draw(st.booleans())}
    schedule = {"decay": decay, "warmup": draw(st.sampled_from([0, 0.1, 7]))}
    if decay == "cosine":
        schedule["final"] = draw(st.sampled_from([0.0, 0.2]))
    recipe = {
        "task": "regression",
        "batch": batch,
        "steps": steps,
        "optimizer": optimizer,
        "schedule": schedule,
        "clip": draw(st.sampled_from([None, 0.5, 1.0])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
    }
    run = {
        "layout": str(layout),
        "micro_batch": micro,
        "log": draw(st.sampled_from(LOGGERS)),
    }
    run |= {"device": draw(st.sampled_from(["auto", "cpu"])), "compile": draw(st.booleans())}
    return {"recipe": recipe, "run": run}


LOGGERS: list[list[Any]] = [[], ["tensorboard"], ["tensorboard", {"kind": "wandb", "project": "p"}], ["wandb"]]


def there_and_back(job: dict[str, Any], form: str, folder: Path) -> tuple[Job, Job, Path]:
    """A job, what comes back of it, and the file in between."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    between = folder / ("config.json" if form == "deepspeed" else "config.yaml")
    again = folder / "again.yaml"
    assert main(["translate", str(folder / "job.yaml"), "--to", form, "--output", str(between), "--force"]) == 0
    assert main(["translate", str(between), "--output", str(again), "--force"]) == 0
    return load(folder / "job.yaml").job, load(again).job, between


def curve(job: Job) -> list[float]:
    """The learning rate of each step."""
    assert job.recipe.steps is not None
    assert job.recipe.optimizer.lr is not None
    return [job.recipe.optimizer.lr * rate(job.recipe.schedule, job.recipe.steps, s) for s in range(job.recipe.steps)]


@FEW
@given(job=jobs())
def test_a_job_comes_back_from_deepspeed(job: dict[str, Any], tmp_path: Path) -> None:
    first, again, between = there_and_back(job, "deepspeed", tmp_path)
    for key in ("batch", "clip", "precision"):
        assert getattr(again.recipe, key) == getattr(first.recipe, key), key
    assert Layout.parse(again.run.layout) == Layout.parse(first.run.layout)
    assert again.run.micro_batch == first.run.micro_batch
    assert again.run.log == first.run.log
    ours, theirs = first.recipe.optimizer, again.recipe.optimizer
    plain = {"decay_all": theirs.decay_all} if not ours.weight_decay else {}  # of no decay there is nothing to say
    assert vars(theirs) == {**vars(ours), **plain}
    if first.recipe.schedule.decay != "none":
        assert curve(again) == pytest.approx(curve(first))
    config = json.loads(between.read_text(encoding="utf-8"))
    ranks = Layout.parse(first.run.layout).data_ranks
    parts = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert config["train_batch_size"] == config[parts[0]] * config[parts[1]] * ranks


@FEW
@given(job=jobs())
def test_a_job_comes_back_from_accelerate(job: dict[str, Any], tmp_path: Path) -> None:
    first, again, between = there_and_back(job, "accelerate", tmp_path)
    assert again.recipe.precision == first.recipe.precision
    assert (again.run.device, again.run.compile) == (first.run.device, first.run.compile)
    layout, came = Layout.parse(first.run.layout), Layout.parse(again.run.layout)
    assert came.size == layout.size
    assert (came.tensor, came.data_ranks) == (layout.tensor, layout.data_ranks)
    remarks = between.read_text(encoding="utf-8")
    for option in ("zero", "recompute", "offload"):
        if getattr(came, option) != getattr(layout, option):
            assert "# - run.layout" in remarks, option  # said, where it could not be kept


PIPELINES = ["pp2 dp2", "pp2 zero1x2 tp2 recompute=selective sequence=whole", "pp2"]


@pytest.mark.parametrize("form", ["deepspeed", "accelerate"])
@pytest.mark.parametrize("layout", PIPELINES)
def test_a_pipeline_comes_back(layout: str, form: str, tmp_path: Path) -> None:
    job = {"recipe": {"task": "regression", "batch": 32, "clip": 0.5}, "run": {"layout": layout}}
    first, again, _ = there_and_back(job, form, tmp_path)
    assert again.recipe.clip == 0.5
    came, sent = Layout.parse(again.run.layout), Layout.parse(first.run.layout)
    assert came.mesh_shape() == sent.mesh_shape()
    assert came.zero == sent.zero


def test_every_key_of_a_job_is_written_or_told() -> None:
    """A key that the file doesn't say has a reason, and a remark where it is not its default."""
    assert set(unsaid.REASONS) | {"run.layout"} == {
        *(f"recipe.{field.name}" for field in fields(Recipe)),
        *(f"run.{field.name}" for field in fields(Run)),
    }
    job = Job(
        recipe=Recipe(
            task="regression", data={"a": 1}, model={"a": 1}, args={"a": 1}, seed=3, epochs=2, dropout=False
        ),
        run=Run(layout="dp2", threads=2, workers=3, rank_lines=True, cut_at=("a",), tensor_plan={"a": "row"}),
    )
    told = {remark.partition(" = ")[0] for remark in unsaid.unsaid(job, {"run.layout", "run.threads"})}
    recipe = {f"recipe.{key}" for key in ("task", "data", "model", "args", "seed", "epochs", "dropout")}
    assert told == recipe | {f"run.{key}" for key in ("workers", "rank_lines", "cut_at", "tensor_plan")}


JOBS = {
    "parameters on disk": ({"layout": "fsdp3 offload=parameters-disk", "offload_folder": "/fast"}, {"batch": 12}),
    "zero3": ({"layout": "fsdp3 offload=parameters"}, {"batch": 12, "precision": "bf16"}),
    "disk": ({"layout": "zero2x2 offload=optimizer-disk", "offload_folder": "/fast"}, {"batch": 12}),
    "slices": ({"layout": "zero1x2 tp2"}, {"batch": 12, "precision": "fp16"}),
    "hybrid": ({"layout": "dp2 fsdp2 recompute=full"}, {"batch": 12, "steps": 50, "schedule": {"decay": "cosine"}}),
    "stages": ({"layout": "pp2 dp2 recompute=selective"}, {"batch": 12, "optimizer": {"name": "sgd"}}),
    "tokens": ({"layout": "fsdp2 cp2"}, {"batch": 12, "steps": 9, "schedule": {"decay": "linear", "warmup": 2}}),
    "replicas": ({"layout": "dp3", "compile": True, "device": "cpu"}, {"batch": 12, "clip": 1.0}),
}


def written(name: str, form: str, folder: Path) -> tuple[Layout, Path]:
    run, recipe = JOBS[name]
    job = {"recipe": {"task": "regression", **recipe}, "run": run}
    first, _, between = there_and_back(job, form, folder)
    return Layout.parse(first.run.layout), between


@pytest.mark.parametrize("name", JOBS)
def test_deepspeed_accepts_what_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # its import sets it
    pytest.importorskip("deepspeed.runtime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DeepSpeed's own imports
        from deepspeed.runtime import config as deepspeed

    layout, between = written(name, "deepspeed", tmp_path)

    class Ranks:
        get_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda: layout.data_ranks * layout.context)

    monkeypatch.setattr(deepspeed, "dist", Ranks)
    read = deepspeed.DeepSpeedConfig(json.loads(between.read_text(encoding="utf-8")))
    assert read.train_batch_size == 12
    assert read.zero_optimization_stage == layout.zero
    assert read.gradient_clipping == (JOBS[name][1].get("clip") or 0)


@pytest.mark.parametrize("name", JOBS)
def test_accelerate_accepts_what_is_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate.commands")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    layout, between = written(name, "accelerate", tmp_path)
    read: Any = load_config_from_file(str(between))
    assert read.num_processes == layout.size
    options, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(between), "train.py"])
    )
    assert options.num_processes == layout.size
    if read.parallelism_config:
        mesh = {key.removeprefix("parallelism_config_"): size for key, size in read.parallelism_config.items()}
        assert ParallelismConfig(**mesh).total_size == layout.size


def test_a_batch_that_ranks_cannot_share_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("recipe: {task: regression, batch: 64}\nrun: {layout: zero1x3}\n")
    for form in ("deepspeed", "accelerate"):
        assert main(["translate", str(tmp_path / "job.yaml"), "--to", form]) == 2
        told = capsys.readouterr().err
        assert "recipe.batch is 64, which the 3 data ranks" in told
        assert "63 or 66" in told


def test_what_json_cannot_say_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(ROOT / "examples" / "regression.yaml"), "--to", "deepspeed"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["optimizer"]["type"] == "SGD"
    assert "samestep: without a key there: recipe.task = 'regression'" in told.err


def test_from_one_tool_to_another(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "translate" / "ds_config.json"
    assert main(["translate", str(example), "--to", "accelerate"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["distributed_type"], config["num_processes"]) == ("DEEPSPEED", 4)
    assert config["deepspeed_config"]["offload_optimizer_device"] == "cpu"
    accelerate = ROOT / "examples" / "translate" / "accelerate.yaml"
    assert main(["translate", str(accelerate), "--to", "deepspeed"]) == 0
    assert "recipe.batch: not in the source, so samestep's default is taken" in capsys.readouterr().err


def test_a_recipe_of_either_optimizer_is_known() -> None:
    """The two that DeepSpeed's writer tells apart are all that a recipe can have."""
    assert {AdamW().name, SGD().name} == {"adamw", "sgd"}
    assert Schedule().decay == "none"
