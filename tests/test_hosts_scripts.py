"""Each engine's own script on two hosts by one command: its ranks see each other, and an all-reduce is right."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_hosts import VARIABLES, needs_hosts, python, record
from testbed import Testbed

pytestmark = [needs_hosts(), pytest.mark.cluster]

SCRIPTS = Path(__file__).parent / "scripts"
PACKAGES = {"horovod": "horovod", "keras": "tensorflow", "deepspeed": "deepspeed", "accelerate": "accelerate"}
SEEN = "each rank sees all three, and the sum of an all-reduce is right"


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(2) as made:
        yield made


@pytest.fixture(scope="module")
def debian() -> Iterator[Testbed]:
    """Hosts that find their own names on their loopback."""
    with Testbed(2, own_name_on_loopback=True) as made:
        yield made


def launched(bed: Testbed, folder: Path, engine: str) -> tuple[int, str]:
    """The exit code of a launch on two hosts, of two ranks and one, and all that it printed."""
    hosts = folder / "hosts"
    hosts.write_text("host-a slots=2\nhost-b slots=1\n", encoding="utf-8")
    script = str(SCRIPTS / f"{engine}_ranks.py")
    launch = python("samestep", "launch", "--hostfile", str(hosts), "--engine", engine, "--", script, "--times", "10")
    running = bed["host-a"].start(launch, env={**VARIABLES, "DS_ACCELERATOR": "cpu"}, cwd=folder)
    return running.wait(120), running.text


def check(engine: str, bed: Testbed, folder: Path) -> None:
    if engine in PACKAGES and importlib.util.find_spec(PACKAGES[engine]) is None:
        pytest.skip(f"{PACKAGES[engine]} is not installed")
    code, printed = launched(bed, folder, engine)
    assert code == 0, printed
    # Each line begins with its host and its rank.
    said = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if '{"rank"' in line]
    assert sorted((each["rank"], each["size"], each["sum"]) for each in said) == [
        (rank, 3, 60.0) for rank in range(3)
    ]


@pytest.mark.parametrize("engine", ["torch", "deepspeed", "accelerate", "horovod", "keras"])
def test_a_script_of_an_engine_runs_on_two_hosts(engine: str, bed: Testbed, tmp_path: Path) -> None:
    check(engine, bed, tmp_path)
    record(
        "hostfile, over SSH",
        f"samestep launch --hostfile hosts --engine {engine} -- script.py",
        "2 ranks and 1",
        SEEN,
    )


@pytest.mark.parametrize("engine", ["torch", "keras"])
def test_hosts_that_find_their_own_names_on_the_loopback_run_it_too(
    engine: str, debian: Testbed, tmp_path: Path
) -> None:
    check(engine, debian, tmp_path)


def test_horovods_script_is_refused_where_horovod_would_not_find_the_hosts(debian: Testbed, tmp_path: Path) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("horovod is not installed")
    code, printed = launched(debian, tmp_path, "horovod")
    assert code != 0
    assert "the name host-a leads to no address that other hosts reach" in printed


ZOO = Path(__file__).resolve().parent.parent / "zoo"


@pytest.mark.parametrize(("script", "kind"), [("right_ddp", None), ("fault_loss_times_ranks", "summed")])
def test_a_script_is_proved_on_two_hosts(bed: Testbed, tmp_path: Path, script: str, kind: str | None) -> None:
    """Each rank writes its record into a folder that both hosts see; rank 0's host compares them."""
    hosts, file = tmp_path / "hosts", tmp_path / "verdict.json"
    hosts.write_text("host-a slots=1\nhost-b slots=1\n", encoding="utf-8")
    verify = python("samestep", "verify", "--script", str(ZOO / f"{script}.py"), "--steps", "3")
    options = ["--launch", f"--hostfile {hosts}", "--json", str(file), "--keep", str(tmp_path / "runs")]
    running = bed["host-a"].start([*verify, *options], env=dict(VARIABLES), cwd=tmp_path)
    code = running.wait(150)
    assert code == (kind is not None), running.text
    verdict = json.loads(file.read_text(encoding="utf-8"))
    assert (verdict["kind"], verdict["processes"], verdict["steps"]) == (kind, 2, 3)
    places = {path.name for path in (tmp_path / "runs/split/logs").iterdir()}
    assert places >= {"host-a", "host-b"}
