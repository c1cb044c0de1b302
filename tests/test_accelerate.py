"""Engine accelerate: the step of one process under replicas and shards, and a user's configuration file as it is."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_recipes import Branched, recipe
from proving import prove, same
from small_tasks import Words
from tiny_models import Tiny

import samestep
from samestep.cli.main import main
from samestep.engines import accelerate, checks, registry
from samestep.layout import Layout

pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parent.parent / "examples" / "accelerate" / "fsdp2.yaml"


def config_file(folder: Path, **changes: Any) -> Path:
    """The example's file with other values; of `fsdp_config` those that are given."""
    values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    values["fsdp_config"] |= changes.pop("fsdp_config", {})
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values | changes), encoding="utf-8")
    return file


# Fast tests have words in shards, and units by the example's file; tests/test_unused.py has branches.
MORE = ("replicas, words", "replicas, branches", "shards", "shards, by size, loaded by rank 0")


def cases_of(folder: Path) -> dict[str, Any]:
    # 200 samples in batches of 33 leave a last one of 2: a rank with one sample, and micro-batches with zero weight.
    plain = recipe(schedule=samestep.Schedule(warmup=3, decay="linear"))
    words = recipe(Words(), optimizer=samestep.SGD(lr=0.1, momentum=0.9), batch=199, clip=None)
    text = recipe(Tiny(name="bert"), batch=13)
    by_size = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100}
    loads = {"fsdp_cpu_ram_efficient_loading": True, **by_size}
    file = config_file(folder, fsdp_config=loads)
    cases: dict[str, Any] = {
        "replicas": (plain, "dp2", {"micro_batch": 7}),
        "replicas, words": (words, "dp2", {"micro_batch": 30}),
        "replicas, branches": (recipe(Branched()), "dp2", {}),
        "shards": (plain, "fsdp2", {"micro_batch": 7}),
        "shards, words": (words, "fsdp2", {"micro_batch": 30}),
        "shards, kept for backward": (plain, "zero2x2", {}),
        "shards, as the example's file says": (text, "fsdp2", {"engine_config": EXAMPLE, "micro_batch": 3}),
        "shards, by size, loaded by rank 0": (plain, "fsdp2", {"engine_config": file}),
        "shards by size, of lists": (text, "fsdp2", {"engine_config": file}),
        "shards of a class that is not there": (plain, "fsdp2", {"engine_config": EXAMPLE}),
    }
    return {name: (job, layout, {"engine": "accelerate", **run}) for name, (job, layout, run) in cases.items()}


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one_process_with_more_models_and_units(tmp_path: Path) -> None:
    cases = {name: case for name, case in cases_of(tmp_path).items() if name in MORE}
    assert same(prove(cases), MORE) == {}


def test_two_ranks_take_the_step_of_one_process(tmp_path: Path) -> None:
    cases = {name: case for name, case in cases_of(tmp_path).items() if name not in MORE}
    proofs = prove(cases)
    *names, lists, absent = cases
    assert same(proofs, names) == {}
    assert "an FSDP unit of the list bert.encoder.layer (ModuleList), and FSDP2 takes no lists" in str(proofs[lists])
    assert str(proofs[absent]).startswith("fsdp_transformer_layer_cls_to_wrap is BertLayer, which is the class of no")


def test_one_process_takes_the_step_and_leaves_the_environment_as_it_was() -> None:
    proof = samestep.verify(recipe(), engine="accelerate", micro_batch=7, threads=1, device="cpu")
    assert proof.same_step, proof


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "precision"), [("dp2", "bf16"), ("fsdp2", "bf16")])
def test_bf16_learns_as_float32_does(layout: str, precision: Any, tmp_path: Path) -> None:
    def final_loss(name: str, **values: Any) -> float:
        return samestep.train(recipe(**values), layout, engine="accelerate", folder=tmp_path / name).losses[-1]

    exact = final_loss("exact")
    assert final_loss("rounded", precision=precision) == pytest.approx(exact, rel=0.05)


@pytest.mark.slow
def test_replicas_of_shards_and_three_ranks() -> None:
    for layout in ("dp2 fsdp2", "dp3", "fsdp3"):
        proof = samestep.verify(recipe(), layout, engine="accelerate", micro_batch=4, threads=1)
        assert proof.same_step, proof


WRONG: list[tuple[str, str, str, dict[str, Any]]] = [
    ("num_processes is 4, and layout", "fsdp2", "fp32", {"num_processes": 4}),
    ("mixed_precision is 'bf16', and recipe.precision is fp32", "fsdp2", "fp32", {"mixed_precision": "bf16"}),
    ("mixed_precision is 'no', and recipe.precision is bf16", "fsdp2", "bf16", {}),
    ("DEEPSPEED; use engine deepspeed", "fsdp2", "fp32", {"distributed_type": "DEEPSPEED"}),
    ("MEGATRON_LM, which engine", "fsdp2", "fp32", {"distributed_type": "MEGATRON_LM"}),
    (
        'MULTI_CPU, which layout "fsdp2" is not; use a layout such as dp2',
        "fsdp2",
        "fp32",
        {"distributed_type": "MULTI_CPU"},
    ),
    ('FSDP, which layout "dp2" is not; use a layout such as fsdp2', "dp2", "fp32", {}),
    ('NO, which layout "dp2" is not; use a layout such as single', "dp2", "fp32", {"distributed_type": "NO"}),
    ("compute_environment is AMAZON_SAGEMAKER", "fsdp2", "fp32", {"compute_environment": "AMAZON_SAGEMAKER"}),
    ("no configuration that Accelerate reads: .*num_procs", "fsdp2", "fp32", {"num_procs": 2}),
    (
        "does not take dynamo_config; use run.compile",
        "fsdp2",
        "fp32",
        {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
    ),
    (
        "fsdp_version is 1; use the file for 2 that `accelerate to-fsdp2",
        "fsdp2",
        "fp32",
        {"fsdp_config": {"fsdp_version": 1}},
    ),
    ("is ZeRO-2; true goes with fsdp2, false with zero2x2", "zero2x2", "fp32", {}),
    ("does not take fsdp_offload_params", "fsdp2", "fp32", {"fsdp_config": {"fsdp_offload_params": True}}),
    ("fsdp_config has fsdp_shards", "fsdp2", "fp32", {"fsdp_config": {"fsdp_shards": 2}}),
    ("fsdp_auto_wrap_policy is EACH", "fsdp2", "fp32", {"fsdp_config": {"fsdp_auto_wrap_policy": "EACH"}}),
    (
        "parallelism_config_dp_shard_size is 4, and layout",
        "fsdp2",
        "fp32",
        {"parallelism_config": {"parallelism_config_dp_shard_size": 4}},
    ),
]


@pytest.mark.parametrize(("message", "layout", "precision", "changes"), WRONG, ids=[case[0][:40] for case in WRONG])
def test_a_file_that_asks_for_another_job_is_refused(
    message: str, layout: str, precision: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = config_file(tmp_path, **changes)
    if changes.get("compute_environment") == "AMAZON_SAGEMAKER":
        keys = ("compute_environment", "debug", "mixed_precision", "use_cpu")
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        of_sagemaker = {
            "distributed_type": "DATA_PARALLEL",
            "ec2_instance_type": "ml.p3.2xlarge",
            "iam_role_name": "role",
        }
        file.write_text(yaml.safe_dump({key: values[key] for key in keys} | of_sagemaker), encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message) as raised:
        samestep.verify(recipe(precision=precision), layout, engine="accelerate", engine_config=file, device="cpu")
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("dp2", {"dynamo_config": {"dynamo_backend": "NO"}}),
        ("dp2", {"mixed_precision": False}),  # YAML's bare no
        ("fsdp2", {"fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True}}),
        ("zero2x2", {"fsdp_config": {"version": 2, "reshard_after_forward": "false"}}),
        # FSDP2 goes by fsdp_reshard_after_forward alone.
        ("fsdp2", {"fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}}),
        ("dp2", {"distributed_type": "MULTI_XPU"}),
    ],
)
def test_the_engine_and_translate_read_the_same(
    layout: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "MULTI_GPU" if layout == "dp2" else "FSDP"
    values = {"distributed_type": kind, "num_processes": 2, "mixed_precision": "no", **changes}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    accelerate.check(file, Layout.parse(layout), "fp32")
    assert main(["translate", str(file), "--batch", "8"]) == 0
    job = capsys.readouterr().out
    assert f"layout: {layout}\n" in job
    assert "compile" not in job
    assert "precision" not in job.partition("\n#")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml is empty"),
        ("a list: [", r"config.yaml:1: not YAML: "),
        ("- distributed_type", r"config.yaml: the file is \['distributed_type'\]; it should be a section of keys"),
        (
            "num_processes: 2\nnum_processes: 4",
            'config.yaml:2: key "num_processes" stands twice, first in .*config.yaml:1; keep one of them$',
        ),
        ("num_processes: 2", "config.yaml: no configuration that Accelerate reads"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message):
        samestep.verify(recipe(), "dp2", engine="accelerate", engine_config=file)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("zero1x2", "no shards of the optimizer state alone; use zero2x2 or fsdp2"),
        ("tp2", 'engine "accelerate" does not split tensor'),
        ("dp2 fsdp2 order=pp.fsdp.dp.cp.tp", "order=pp.dp.fsdp.cp.tp"),
        ("fsdp2 offload=optimizer", "has no offload=optimizer"),
    ],
)
def test_layouts_that_it_has_not_are_refused(layout: str, message: str) -> None:
    with pytest.raises(samestep.LayoutError, match=message):
        samestep.verify(recipe(), layout, engine="accelerate")


@pytest.mark.parametrize(("engine", "command"), [("accelerate", "pip install"), ("horovod", "make horovod")])
def test_a_package_that_is_not_there_is_named(engine: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(samestep.UserError, match=f"needs {engine}, which is not installed; use {command}"):
        checks.check_layout(registry.resolve(engine), Layout.parse("dp2"), "fp32")
