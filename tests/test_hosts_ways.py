"""The same job started in every way gives the same losses; needs what `tools/cluster-packages` installs."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_on_hosts
from on_hosts import VARIABLES, follow, job_file, losses_alone, losses_in, needs_hosts, needs_programs, record
from testbed import Testbed
from testbed.possible import program
from ways_to_start import WAYS, Setting, Way

pytestmark = [needs_hosts(), pytest.mark.cluster]

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
            marks.append(pytest.mark.skip(reason=f"{way.package} is not installed; tools/cluster-packages would do"))
        found.append(pytest.param(way, id=f"{number}-{way.place}", marks=marks))
    return found


@pytest.mark.parametrize("way", ways())
def test_the_same_job_gives_the_same_losses(
    way: Way, bed: Testbed, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if way.needs is not None:
        request.getfixturevalue(way.needs)
    run = tmp_path / "run"
    train = ["samestep", "train", str(job_file(tmp_path)), "--layout", "dp2", "--folder", str(run)]
    commands = [
        bed[start.host].start(start.command, env={**VARIABLES, **start.env}, cwd=tmp_path)
        for start in way.starts(Setting(bed=bed, folder=tmp_path, train=train))
    ]
    first = follow(commands, run, limit=120)
    assert losses_in(run) == pytest.approx(losses_alone(), rel=1e-12)
    record(way.place, way.shown, way.tried, "the losses of one process", first)
