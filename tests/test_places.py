"""Places: this machine, and which of several places is taken."""

from pathlib import Path

import pytest
from places import BATCH, OPEN_MPI, PYTORCHJOB, SAGEMAKER, TORCHRUN, Here, at, read, refused, slots

from samestep.errors import UserError
from samestep.launch.environments.base import PlaceInputs, Slots
from samestep.launch.environments.registry import PLACES, check_not_alone, find, idle_hosts

pytestmark = pytest.mark.quick


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.mark.parametrize(("accelerators", "count", "counted"), [(0, 8, "cores"), (4, 4, "accelerators")])
def test_this_machine_has_its_accelerators_or_its_cores(accelerators: int, count: int, counted: Slots) -> None:
    found = at({}, host=Here(accelerators=accelerators))
    assert (found.cluster.place, found.cluster.this, found.slots_from) == ("this-machine", 0, counted)
    assert slots(found) == {"localhost": count}
    assert read(found) == {counted: str(count)}


def test_this_machine_shows_the_variable_that_hides_devices() -> None:
    assert read(at({"CUDA_VISIBLE_DEVICES": "2,3"}, host=Here(accelerators=2)))["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_real_machine_is_found() -> None:
    found = find(PlaceInputs(environ={}))
    assert found.cluster.world_size >= 1
    assert found.cluster.this == 0


def test_what_the_user_names_wins(hostfile: Path) -> None:
    hostfile.write_text("worker-1 slots=2\n", encoding="utf-8")
    everything = {**BATCH, **OPEN_MPI, **SAGEMAKER, **TORCHRUN}
    assert at(everything, hostfile=hostfile).cluster.place == "hostfile"


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({**BATCH, **TORCHRUN}, "torchrun"),
        ({**SAGEMAKER, **TORCHRUN}, "torchrun"),
        ({**PYTORCHJOB, **TORCHRUN}, "torchrun"),
        ({**BATCH, **OPEN_MPI}, "open-mpi"),
        ({**SAGEMAKER, **OPEN_MPI}, "open-mpi"),
        ({**BATCH, "RAY_ADDRESS": "auto"}, "slurm"),
        ({"SLURM_JOB_ID": "7"}, "this-machine"),
    ],
)
def test_the_innermost_launcher_wins(environ: dict[str, str], place: str) -> None:
    assert at(environ).cluster.place == place


def test_a_place_can_be_chosen() -> None:
    assert at({**BATCH, **OPEN_MPI}, "slurm").cluster.place == "slurm"
    assert at(BATCH, "this-machine").cluster.place == "this-machine"


def test_a_place_that_is_wrong(hostfile: Path) -> None:
    names = ", ".join(sorted(each.name for each in PLACES))
    assert refused({}, place="slrm") == f'--place "slrm" is not known; did you mean "slurm"? known: {names}'
    assert '--place "slurm": it needs SLURM_JOB_ID; found here: this-machine' in refused({}, place="slurm")
    assert '--place "hostfile": it needs --hostfile FILE' in refused({}, place="hostfile")
    said = refused(BATCH, place="slurm", hostfile=hostfile)
    assert said == '--place "slurm" and --hostfile FILE are two places; leave one of them out'
    both = refused({}, hostfile=hostfile, ray="auto")
    assert both == "--hostfile FILE and --ray ADDRESS or RAY_ADDRESS both name hosts; leave one of them out"


@pytest.mark.parametrize("environ", [SAGEMAKER, PYTORCHJOB])
def test_hosts_that_would_each_do_the_whole_job_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"this is one of 2 hosts of a \w+ job, which all run this command"):
        check_not_alone(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {"RAY_ADDRESS": "auto"},
        {**SAGEMAKER, "SM_HOSTS": '["algo-2"]'},
        {**SAGEMAKER, **TORCHRUN},
        {**PYTORCHJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
    ],
)
def test_a_job_that_one_command_starts_is_not_refused(environ: dict[str, str]) -> None:
    check_not_alone(environ)


def test_hosts_that_a_training_would_leave_idle_are_told() -> None:
    assert idle_hosts(BATCH) == (
        "this slurm job has 3 hosts, and the training takes this one alone; with --place slurm it takes all of them"
    )
    assert idle_hosts({**BATCH, "SLURM_JOB_NODELIST": "gpu01", "SLURM_JOB_NUM_NODES": "1"}) is None
    assert idle_hosts({**BATCH, "SLURM_NODEID": "7"}) is None  # wrong, and of no matter here
    assert idle_hosts({"RAY_ADDRESS": "10.0.0.5:6379"}) is None  # no cluster is asked for a note
    assert idle_hosts({}) is None
