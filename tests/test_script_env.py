"""What each engine's own scripts find when they start as ranks: they see each other, and an all-reduce is right."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launching import free_port
from small_jobs import wait_until

from samestep.errors import UserError
from samestep.launch.affinity import bindings, this_machine
from samestep.launch.script_env import keras, registry, sidecar
from samestep.launch.script_env.horovod import slots_of, variables_of
from samestep.launch.worker import rank_command
from samestep.ranks import Ranks

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
RANK_0 = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, one_host=True)


def needs(package: str, how: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed; {how}")


def lines_of(output: str) -> list[dict[str, Any]]:
    """What the ranks of a script said, in the order of ranks."""
    return sorted(
        (json.loads(line) for line in output.splitlines() if line.startswith("{")), key=lambda said: said["rank"]
    )


def started(name: str, engine: str | None = None, **variables: str) -> list[dict[str, Any]]:
    """What an engine's script says on two ranks that torchrun started, after what all of them must say."""
    command = [str(SCRIPTS / f"{name}_ranks.py"), "--times", "10"]
    done = subprocess.run(
        [*TORCHRUN, *rank_command(command, engine=engine or name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables,
    )
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stdout)
    assert [(each["rank"], each["size"], each["sum"]) for each in said] == [(0, 2, 30.0), (1, 2, 30.0)]
    assert [each["local"] for each in said] == [[0, 2], [1, 2]]
    return said


@pytest.mark.slow
def test_a_script_of_pytorch_is_bound_and_has_its_threads() -> None:
    said = started("torch")
    own = bindings(this_machine(), 2)
    assert [each["threads"] for each in said] == [each.threads for each in own]
    everywhere = sorted(os.sched_getaffinity(0))
    assert [each["processors"] for each in said] == [list(each.processors or everywhere) for each in own]


@needs("deepspeed", "pip install 'samestep[deepspeed]'")
@pytest.mark.slow
def test_a_script_of_deepspeed_has_its_local_rank_as_an_argument() -> None:
    said = started("deepspeed", DS_ACCELERATOR="cpu")
    assert [each["cross"] for each in said] == [[0, 1]] * 2


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: bf16
num_machines: 1
num_processes: 7
use_cpu: true
"""


@pytest.fixture
def configured(tmp_path: Path) -> str:
    """Accelerate's folder, with what `accelerate config` writes there."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(CONFIG, encoding="utf-8")
    return str(tmp_path)


@needs("accelerate", "pip install 'samestep[accelerate]'")
def test_ranks_of_accelerate_have_what_the_user_configured_in_the_environment(configured: str) -> None:
    environ = {"HF_HOME": configured, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = registry.expected("accelerate", RANK_0, environ, 1).variables
    assert (found["ACCELERATE_MIXED_PRECISION"], found["ACCELERATE_USE_CPU"].lower()) == ("bf16", "true")
    assert (found["RANK"], found["WORLD_SIZE"]) == ("0", "2")  # not the 7 processes of the file


@needs("accelerate", "pip install 'samestep[accelerate]'")
@pytest.mark.slow
def test_a_script_of_accelerate_finds_what_the_user_configured(configured: str) -> None:
    said = started("accelerate", HF_HOME=configured, DS_ACCELERATOR="cpu")
    assert [each["precision"] for each in said] == ["bf16"] * 2


def test_a_script_of_lightning_has_its_devices_in_the_environment() -> None:
    ranks = Ranks(rank=2, world_size=4, local_rank=0, local_world_size=2)
    environ = {"MASTER_ADDR": "host-a", "MASTER_PORT": "29500", "LT_STRATEGY": "fsdp"}
    found = registry.expected("lightning", ranks, environ, 1).variables
    assert (found["LT_DEVICES"], found["LT_NUM_NODES"], found["LT_CLI_USED"]) == ("2", "2", "1")
    assert (found["PL_TRAINER_DEVICES"], found["PL_TRAINER_NUM_NODES"]) == ("2", "2")
    assert (found["RANK"], found["WORLD_SIZE"]) == ("2", "4")
    assert "LT_STRATEGY" not in found  # the user's own stays
    alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert "LT_STRATEGY" not in registry.expected("lightning", alone, {}, 1).variables


@needs("horovod", "make horovod")
def test_a_script_of_horovod_meets_twice_and_leaves_no_server() -> None:
    said = started("horovod")
    assert [each["cross"] for each in said] == [[0, 1]] * 2
    until = time.monotonic() + 5
    while (left := servers_left()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def servers_left() -> list[int]:
    """The helpers beside ranks that this test's jobs started and that are still there."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        named = any(word.startswith("samestep.launch.script_env.") for word in process.info["cmdline"] or [])
        if named and (process.info["environ"] or {}).get("SAMESTEP_TEST") == str(os.getpid()):
            found.append(process.pid)
    return found


@needs("tensorflow", "pip install 'samestep[tensorflow]'")
@pytest.mark.slow
def test_a_script_of_tensorflow_finds_the_other_workers() -> None:
    said = started("keras")
    assert [each["threads"] for each in said] == [each.threads for each in bindings(this_machine(), 2)]


@pytest.mark.slow
@needs("tensorflow", "pip install 'samestep[tensorflow]'")
def test_workers_and_parameter_servers_end_with_their_chief() -> None:
    torchrun = [word.replace("=2", "=3") for word in TORCHRUN]
    command = rank_command([str(SCRIPTS / "keras_servers.py")], engine="keras:servers=1")
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    (chief,) = lines_of(done.stdout)
    assert (chief["kind"], chief["sum"]) == ("chief", 40.0)
    assert "/job:ps/replica:0/task:0" in chief["device"]


@pytest.mark.parametrize(("ends", "code"), [("chief", 0), ("command", 7)])
def test_a_command_is_ended_with_another_rank_and_else_ends_by_itself(ends: str, code: int, tmp_path: Path) -> None:
    started = "from samestep.launch.script_env.sidecar import start; print(start('127.0.0.1'), flush=True); "
    chief = subprocess.Popen(
        [sys.executable, "-c", started + "import time; time.sleep(60)"], stdout=subprocess.PIPE, text=True
    )
    assert chief.stdout is not None
    port = int(chief.stdout.readline())
    began, end = tmp_path / "began", tmp_path / "end"
    program = f"import os, pathlib, sys, time; pathlib.Path({str(began)!r}).touch()\n"
    program += f"while not os.path.exists({str(end)!r}): time.sleep(0.02)\n"
    program += "sys.exit(7)"
    other = subprocess.Popen(sidecar.until_rank_ends("127.0.0.1", port, [sys.executable, "-c", program]))
    try:
        wait_until(began.exists)
        assert other.poll() is None
        if ends == "chief":
            chief.kill()
        else:
            end.touch()
        assert other.wait(20) == code
    finally:
        chief.kill()
        chief.communicate()
        other.kill()
        other.wait()


@pytest.mark.slow
def test_ranks_agree_where_no_agent_serves_them() -> None:
    # As on hosts of one rank each; the port where they agree is the script's own afterwards.
    port = str(free_port())
    command = rank_command([str(SCRIPTS / "torch_ranks.py"), "--times", "10"], engine="keras", bind="none")
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    said = [lines_of(process.communicate(timeout=100)[0])[0] for process in ranks]
    assert [each["sum"] for each in said] == [30.0, 30.0]
    first, second = (each["tf_config"] for each in said)
    assert first["cluster"] == second["cluster"]
    assert len(set(first["cluster"]["worker"])) == 2
    assert (first["task"], second["task"]) == ({"type": "worker", "index": 0}, {"type": "worker", "index": 1})


FAILS_ONCE = """
import json, os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
said = {"rank": int(os.environ["RANK"]), "count": count, "cluster": json.loads(os.environ["TF_CONFIG"])["cluster"]}
sys.stdout.write(json.dumps(said) + "\\n")
sys.exit(count == "0")
"""


@pytest.mark.slow
def test_ranks_that_are_started_again_agree_again(tmp_path: Path) -> None:
    script = tmp_path / "fails_once.py"
    script.write_text(FAILS_ONCE, encoding="utf-8")
    command = [*TORCHRUN[:-1], "--max-restarts=1", TORCHRUN[-1], *rank_command([str(script)], engine="keras")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    again = [each["cluster"] for each in lines_of(done.stdout) if each["count"] == "1"]
    assert len(again) == 2
    assert again[0] == again[1]


def test_parameter_servers_stand_behind_a_chief_and_the_workers() -> None:
    kinds = keras.kinds_of(5, 2)
    assert kinds == ["chief", "worker", "worker", "ps", "ps"]
    places = [f"h:{rank}" for rank in range(5)]
    assert keras.config(2, kinds, places) == {
        "cluster": {"chief": ["h:0"], "worker": ["h:1", "h:2"], "ps": ["h:3", "h:4"]},
        "task": {"type": "worker", "index": 1},
    }
    with pytest.raises(UserError, match=r"keras:servers=2: 3 ranks are too few .* 4 or more"):
        keras.kinds_of(3, 2)


def test_horovods_ranks_are_numbered_within_hosts_and_across() -> None:
    # Two ranks, three, and one.
    slots = slots_of([0, 1, 0, 1, 2, 0])
    columns = {name: [slot[name] for slot in slots] for name in slots[0]}
    assert columns == {
        "hostname": ["host-1", "host-1", "host-2", "host-2", "host-2", "host-3"],
        "rank": [0, 1, 2, 3, 4, 5],
        "size": [6] * 6,
        "local_rank": [0, 1, 0, 1, 2, 0],
        "local_size": [2, 2, 3, 3, 3, 1],
        "cross_rank": [0, 0, 1, 1, 0, 2],
        "cross_size": [3, 2, 3, 2, 1, 3],
    }
    found = variables_of(slots[4], "10.0.0.1", 99, "eth0")
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_LOCAL_SIZE"], found["HOROVOD_HOSTNAME"]) == (
        "0",
        "3",
        "host-2",
    )
    assert (found["HOROVOD_GLOO_RENDEZVOUS_ADDR"], found["HOROVOD_GLOO_IFACE"]) == ("10.0.0.1", "eth0")
    assert "HOROVOD_GLOO_IFACE" not in variables_of(slots[4], "10.0.0.1", 99, None)


def test_hosts_are_numbered_as_the_launcher_says_or_as_ranks_are() -> None:
    ranks = Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)
    met = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    said = registry.expected("deepspeed", ranks, met, 1)
    assert (said.variables["CROSS_RANK"], said.variables["CROSS_SIZE"]) == ("1", "2")
    assert said.arguments == ("--local_rank=1",)
    of_ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    uneven = met | of_ranks | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}
    said = registry.expected("deepspeed:local-rank=no", ranks, uneven, 1)
    assert (said.variables["CROSS_RANK"], said.variables["GROUP_WORLD_SIZE"]) == ("2", "3")
    assert said.arguments == ()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("jax", r"^--engine jax: it can be torch, deepspeed, accelerate, horovod, keras, lightning$"),
        ("torch:servers=1", r"^--engine torch:servers=1: no option 'servers=1'; the options of torch are none$"),
        ("keras:server=1", r"no option 'server=1'; the options of keras are servers=: parameter servers"),
        ("keras:servers", r"no option 'servers'"),
        ("keras:servers=some", r"servers=some; it must be a whole number of 0 or more"),
        ("keras:servers=1,servers=2", r"servers is given twice"),
        ("deepspeed:local-rank=maybe", r"local-rank=maybe; it can be yes or no"),
    ],
)
def test_a_wrong_engine_is_refused(engine: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry.check(engine)


@pytest.mark.parametrize(
    ("environ", "missing"), [({}, "no MASTER_ADDR and no MASTER_PORT"), ({"MASTER_ADDR": "a"}, "no MASTER_PORT")]
)
def test_ranks_that_nobody_told_where_to_meet_are_refused(environ: Mapping[str, str], missing: str) -> None:
    with pytest.raises(UserError, match=f"^rank 0 of 2 has {missing} in its environment"):
        registry.expected("torch", RANK_0, environ, 1)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="the package horovod is not installed; use make horovod"):
        registry.expected("horovod", RANK_0, {}, 1)


@needs("accelerate", "pip install 'samestep[accelerate]'")
def test_a_script_of_accelerate_without_a_file_is_told_of_the_cpu(tmp_path: Path) -> None:
    empty = {"HF_HOME": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    on_cpu = {} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"}
    for environ, wanted in ((empty, on_cpu), (empty | {"ACCELERATE_USE_CPU": "false"}, {})):
        found = registry.expected("accelerate", RANK_0, environ, 1).variables
        assert {name: value for name, value in found.items() if name.startswith("ACCELERATE")} == wanted


@needs("accelerate", "pip install 'samestep[accelerate]'")
def test_a_configuration_that_accelerate_refuses_is_named(tmp_path: Path) -> None:
    alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    with pytest.raises(UserError, match=r"config=missing.yaml: there is no such file in"):
        registry.expected("accelerate:config=missing.yaml", alone, {}, 1)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG + "colour: blue\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"wrong.yaml: Accelerate can't launch from it: (.|\n)*colour"):
        registry.expected(f"accelerate:config={wrong}", alone, {}, 1)
