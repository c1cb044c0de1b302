"""The same job started in every way gives the same losses; needs what `tools/cluster-packages` installs."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_on_hosts
import yaml
from on_hosts import SAME, VARIABLES, follow, needs_hosts, needs_programs, proved, python, record
from small_jobs import job_file, losses_alone, losses_in
from testbed import Running, Testbed
from testbed.possible import program
from ways_to_start import MPIRUN, OVER_SSH, WAYS, WITHOUT_SSH, Setting, Way, sagemaker

pytestmark = [needs_hosts(), pytest.mark.cluster]

SAGEMAKER = "samestep launch -- -m samestep train entry.yaml"
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    binds = {}
    if all(program(name) is not None for name in slurm_on_hosts.PROGRAMS):
        folder = slurm_on_hosts.settings(tmp_path_factory.mktemp("slurm") / "etc", ("host-a", "host-b"))
        binds[folder] = slurm_on_hosts.SETTINGS
    with Testbed(3, binds=binds) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(bed: Testbed) -> None:
    """Slurm on the first two hosts."""
    folder = next(iter(bed.binds))
    slurm_on_hosts.start(bed.hosts[:2], folder)


@pytest.fixture(scope="module")
def ray(bed: Testbed) -> None:
    """A Ray cluster of the first two hosts; each has its files for itself, in /tmp/ray of its own."""
    port = 6379
    for number, host in enumerate(bed.hosts[:2]):
        host.run(["mount", "-t", "tmpfs", "tmpfs", "/opt"])
        where = ["--head", f"--port={port}"] if number == 0 else [f"--address=host-a:{port}"]
        where += ["--num-cpus=1", f"--node-ip-address={host.address}", "--disable-usage-stats"]
        host.run(
            [RAY, "start", *where, *(["--temp-dir=/opt/ray"] if number == 0 else [])], timeout=120, env=VARIABLES
        )


def ways() -> list[object]:
    found = []
    for number, way in enumerate(WAYS):
        marks = [needs_programs(*way.programs)] if way.programs else []
        if way.package is not None and importlib.util.find_spec(way.package) is None:
            marks.append(pytest.mark.skip(reason=f"{way.package} is not installed; run tools/cluster-packages"))
        found.append(pytest.param(way, id=f"{number}-{way.place}", marks=marks))
    return found


def started(way: Way, bed: Testbed, folder: Path, *words: str) -> list[Running]:
    """`samestep` with these words on two hosts, in one way to start it."""
    at = Setting(bed=bed, folder=folder, train=["samestep", *words])
    return [bed[each.host].start(each.command, env={**VARIABLES, **each.env}, cwd=folder) for each in way.starts(at)]


@pytest.mark.parametrize("way", ways())
def test_the_same_job_gives_the_same_losses(
    way: Way, bed: Testbed, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if way.needs is not None:
        request.getfixturevalue(way.needs)
    run = tmp_path / "run"
    train = ["train", str(job_file(tmp_path)), "--layout", "dp2", "--folder", str(run)]
    first = follow(started(way, bed, tmp_path, *train), run, limit=120)
    assert losses_in(run) == pytest.approx(losses_alone(), rel=1e-12)
    record(way.place, way.shown, way.tried, SAME, first)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["fsdp2", "pp2"])
@pytest.mark.parametrize("way", [OVER_SSH, WITHOUT_SSH], ids=lambda way: way.place)
def test_a_layout_over_two_hosts_is_proved(way: Way, layout: str, bed: Testbed, tmp_path: Path) -> None:
    run, found = tmp_path / "run", tmp_path / "proof.json"
    job = [str(job_file(tmp_path)), "--layout", layout]
    first = follow(started(way, bed, tmp_path, "train", *job, "--folder", str(run)), run, limit=120)
    assert losses_in(run) == pytest.approx(losses_alone(), rel=1e-12)
    record(way.place, f"{way.shown} --layout {layout}", f"{layout} over 2 hosts", SAME, first)
    for command in started(way, bed, tmp_path, "verify", *job, "--json", str(found), "--force"):
        command.finish(90)
    shown = way.shown.replace("train", "verify")
    record(way.place, f"{shown} --layout {layout}", f"proof of {layout}", proved(found))


def in_container(rank: int, **more: str) -> dict[str, str]:
    """The variables of a container of a SageMaker job."""
    return {**VARIABLES, **sagemaker(rank), "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data", **more}


def test_a_sagemaker_job_has_folders_and_hyperparameters(tmp_path: Path) -> None:
    words = yaml.safe_load(job_file(tmp_path).read_text())
    words["run"]["folder"] = "${SM_OUTPUT_DATA_DIR}/run"
    job = tmp_path / "entry.yaml"
    job.write_text(yaml.safe_dump(words))
    given = {"layout": "dp2", "recipe.steps": 4}
    behind = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    said = {"SM_HPS": json.dumps(given), "SM_USER_ARGS": json.dumps(behind)}
    entry = [*python("samestep", "launch", "--", "-m", "samestep", "train", str(job))]
    with Testbed(2, ssh=False) as containers:
        for host in containers.hosts:  # nothing of /opt/ml is shared
            host.own_folder(Path("/opt"))
            host.run(["mkdir", "-p", "/opt/ml/output/data", "/opt/ml/model", "/opt/ml/checkpoints"])
        commands = [
            host.start([*entry, *behind], env=in_container(rank, **said), cwd=tmp_path)
            for rank, host in enumerate(containers.hosts)
        ]
        for command in commands:
            command.finish(120)
        first, second = containers.hosts
        lines = first.run(["cat", "/opt/ml/output/data/run/metrics.jsonl"]).stdout.splitlines()
        assert second.run(["ls", "/opt/ml/output/data"]).stdout == ""  # rank 0's host writes
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses == pytest.approx(losses_alone(steps=4), rel=1e-12)
        seen = f"{SAME}, in the first container's output folder"
        record("SageMaker's variables", SAGEMAKER, "its folders and hyperparameters, 2 containers", seen)

        apart = ["--checkpoint-every", "2", "--set", "run.checkpoint.folder=/opt/ml/checkpoints"]
        commands = [
            host.start([*entry, *apart, *behind], env=in_container(rank, **said), cwd=tmp_path)
            for rank, host in enumerate(containers.hosts)
        ]
        told = []
        for command in commands:
            assert command.wait(120) != 0
            told.append(command.text)
        assert "host-b (rank 1) doesn't see what host-a writes into /opt/ml/checkpoints" in "".join(told)


@needs_programs("mpirun")
def test_ranks_of_mpirun_meet_on_hosts_that_find_their_own_names_on_the_loopback(tmp_path: Path) -> None:
    train = ["samestep", "train", str(job_file(tmp_path)), "--layout", "dp2", "--folder", str(tmp_path / "run")]
    with Testbed(2, own_name_on_loopback=True) as debian:
        command = debian["host-a"].start([*MPIRUN, *python(*train)], env=VARIABLES, cwd=tmp_path)
        first = follow([command], tmp_path / "run", limit=120)
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(), rel=1e-12)
    tried = "2 hosts that find their own names on the loopback"
    record("Open MPI", "mpirun ... samestep train job.yaml", tried, SAME, first)
