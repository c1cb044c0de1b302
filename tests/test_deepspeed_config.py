"""Engine deepspeed: the user's ds_config.json, taken as it is, completed and explained."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from small_tasks import Points

import samestep
from samestep.cli.main import main
from samestep.engines.deepspeed import config as configuration
from samestep.engines.deepspeed import keys
from samestep.engines.deepspeed.config import JobValues
from samestep.engines.registry import resolve
from samestep.job import Job, Run
from samestep.jobfile import load
from samestep.layout import Layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)

ROOT = Path(__file__).resolve().parent.parent


def written(folder: Path, **config: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


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
    asked = JobValues(ranks=2, stage=1, batch=32, micro_batch=8, clip=0.2, precision="bf16")
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
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, {}, "does not divide; use 24 or 32"),
        ({"train_batch_size": 64}, {}, "recipe.batch is 32 .* batches of 64; use recipe.batch: 64"),
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


@pytest.mark.parametrize(
    ("text", "message"), [("{", "ds.json:1: not JSON: Expecting"), ("[]", "the file is .*should be a section")]
)
def test_a_file_that_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(samestep.Recipe(task=Points(), batch=33), engine="deepspeed", engine_config=path)


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


@pytest.mark.parametrize(
    ("text", "stage", "offload"),
    [
        ('{"zero_optimization": true}', 1, None),
        ('{"zero_optimization": false}', 0, None),
        ('{"zero_optimization": {"stage": 2, "cpu_offload": true}}', 2, "cpu"),
        ('{"zero_optimization": {"stage": 2, "cpu_offload": false}}', 2, None),
        ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}', 3, "cpu"),
        (
            '// DeepSpeed reads Hjson\n{"zero_optimization": {"stage": 1,}, # so far\n "bf16": {"enabled": true}}',
            1,
            None,
        ),
    ],
)
def test_the_engine_translate_and_deepspeed_read_the_same(
    text: str, stage: int, offload: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")
    config = configuration.read(file)
    assert (keys.stage_of(config), keys.offload_of(config, "offload_optimizer")) == (stage, offload)

    done = configuration.completed(config, JobValues(ranks=2, batch=8), on_cpu=True)
    zero = importlib.import_module("deepspeed.runtime.zero.config")
    for theirs in (zero.get_zero_config(config), zero.get_zero_config(done)):
        assert int(theirs.stage) == stage
        assert getattr(theirs.offload_optimizer, "device", None) == offload

    assert main(["translate", str(file), "--processes", "2", "--batch", "8"]) == 0
    layout = {0: "dp2", 1: "zero1x2", 2: "zero2x2", 3: "fsdp2"}[stage]
    assert f"layout: {layout}{' offload=optimizer' if offload else ''}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 8, "train_batch_size": 9}', "key 'train_batch_size' stands twice; keep one of them"),
        ('{"train_batch_size": 8 "steps_per_print": 9}', ":1: not JSON: Expecting ',' delimiter at column 24"),
        (" ", " is empty"),
    ],
)
def test_a_mistake_in_the_file_has_one_message(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError) as told:
        configuration.read(file)
    assert message in str(told.value)
    assert main(["translate", str(file)]) == 2
    assert capsys.readouterr().err == f"samestep: {told.value}\n"


def test_the_older_name_of_bf16_counts_where_the_newer_one_is_missing(tmp_path: Path) -> None:
    older = {"bfloat16": {"enabled": True}}
    both = {**older, "bf16": {"enabled": False}}
    own = importlib.import_module("deepspeed.runtime.precision_config").get_bfloat16_config
    assert [own(config).enabled for config in (older, both)] == [True, False]
    assert [keys.precision_of(config) for config in (older, both)] == ["bf16", "fp32"]
