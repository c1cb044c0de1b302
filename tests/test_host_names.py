"""Names of hosts, from wherever they come: none is an option, a command or a million of others."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from places import BATCH, LSF, OPEN_MPI, SAGEMAKER, TORCHRUN, Here, at, refused

from samestep.cli.main import main
from samestep.errors import UserError
from samestep.host_names import MOST_HOSTS, check_host
from samestep.launch.environments import registry
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs
from samestep.launch.environments.slurm import Slurm, host_names
from samestep.launchers import slurm_counts

pytestmark = pytest.mark.quick

WRONG = {
    "": "it is empty",
    "-oProxyCommand": "it begins with a dash, as an option does",
    "-oProxyCommand=touch x": "it begins with a dash, as an option does",
    "--": "it begins with a dash, as an option does",
    "root@worker-1": "a user's name is no part of it; OpenSSH's configuration has the user (User)",
    "a" * 254: "it has 254 characters, and a name has 253 at most",
    **dict.fromkeys(
        [
            "a b",
            "a\tb",
            "a\nb",
            "a\0b",
            "a\x1b[31mb",
            "a;b",
            "$(b)",
            "`b`",
            "a/b",
            "ä",
            "a=b",
            "a,b",
            "١",
            ".a",
            "a:22",
        ],
        "a name has letters, digits, dots, dashes and underscores, and no others",
    ),
    "fe80::1%eth0;b": "a name has letters, digits, dots, dashes and underscores, and no others",
}
RIGHT = ["worker-1", "a", "1", "gpu_01.example.com", "a.", "_a", "x" * 253, "10.0.0.5", "fd00::5", "fe80::1%eth0"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_told_with_its_reason(name: str) -> None:
    with pytest.raises(UserError) as error:
        check_host(name, "LIST")
    assert str(error.value).startswith('LIST: "')
    assert str(error.value).endswith(f'" is no host: {WRONG[name]}') or len(name) > 60
    assert WRONG[name] in str(error.value)
    assert len(str(error.value)) < 200
    assert str(error.value).isprintable()


def test_right_names_are_left_as_they_are() -> None:
    assert [check_host(name, "LIST") for name in RIGHT] == RIGHT


def sagemaker(name: str) -> str:
    return refused({**SAGEMAKER, "SM_HOSTS": json.dumps(["algo-1", name]), "SM_CURRENT_HOST": "algo-1"})


SOURCES: dict[str, Callable[[str], str]] = {
    "slurm": lambda name: refused({**BATCH, "SLURM_JOB_NODELIST": f"gpu01,gpu02,{name}"}),
    "slurm ranges": lambda name: refused({**BATCH, "SLURM_JOB_NODELIST": f"{name}[1-3]"}),
    "lsf": lambda name: refused({**LSF, "LSB_MCPU_HOSTS": f"host-a 2 {name} 1"}),
    "sagemaker": sagemaker,
    "torchrun": lambda name: refused({**TORCHRUN, "MASTER_ADDR": name}),
    "open-mpi": lambda name: refused({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://10.0.0.5,{name}:37865"}),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["-oProxyCommand", "root@a", "a" * 254, "$(id)"])
def test_every_source_refuses_it(source: str, name: str) -> None:
    said = SOURCES[source](name)
    assert "is no host" in said or "is no part of a list of hosts" in said
    assert len(said) < 400


@pytest.mark.parametrize("words", [["--hostfile", "FILE"], ["--master-addr", "NAME", "--no-ssh", "--num-nodes", "2"]])
@pytest.mark.parametrize("name", ["-oProxyCommand=x", "root@a", "a" * 254, "a\x1bb"])
def test_options_refuse_it(words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"worker-1\n{name}\n", encoding="utf-8")
    words = [word.replace("FILE", str(file)) for word in words]
    words = [f"{words[0]}={name}", *words[2:]] if "NAME" in words else words
    assert main(["launch", *words, "--", "true"]) == 2
    assert "is no host" in capsys.readouterr().err


def test_a_place_that_checks_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Ray, whose nodes say their addresses."""

    class Careless(Slurm):
        def find(self, inputs: PlaceInputs) -> FoundCluster:
            hosts = tuple(Host(name=name, slots=1) for name in names)
            return FoundCluster(cluster=Cluster(place="slurm", hosts=hosts))

    monkeypatch.setattr(registry, "PLACES", (Careless(),))
    names = ["a", "-oProxyCommand=x"]
    assert refused(BATCH) == (
        'place slurm (SLURM_JOB_ID): "-oProxyCommand=x" is no host: it begins with a dash, as an option does'
    )
    names = ["a"] * (MOST_HOSTS + 1)
    assert refused(BATCH) == "place slurm (SLURM_JOB_ID) names 65,537 hosts, and a job has 65,536 at most"


@pytest.mark.parametrize(
    "text",
    [
        "n[0-9999999999]",
        "n[0-999999999]",
        "n[0-99999][0-99999]",
        "[0-9][0-9][0-9][0-9][0-9]",
        "n[1-50000],n[1-50000]",
    ],
)
def test_more_hosts_than_any_job_has_are_counted_and_not_listed(text: str) -> None:
    began = time.process_time()
    with pytest.raises(UserError, match=r"and a job has 65,536 at most|is no part of a list of hosts"):
        host_names("SLURM_JOB_NODELIST", text)
    assert time.process_time() - began < 1
    assert len(host_names("SLURM_JOB_NODELIST", "n[00001-65536]")) == MOST_HOSTS


@pytest.mark.parametrize("text", ["a," * 200_000, "[" * 200_000, "a[1]," * 100_000, "," * 10**6, "a[1-2" * 100_000])
def test_a_long_list_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    with pytest.raises(UserError) as error:
        host_names("SLURM_JOB_NODELIST", text)
    assert len(str(error.value)) < 300
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "text", ["n[1-[2-3]]", "n[[1-2]]", "n[1-2]]", "n[1", "n]1[", "n[9-8]", "n[1-2,]", "n[-1]", "n[1--2]"]
)
def test_brackets_that_do_not_fit(text: str) -> None:
    with pytest.raises(UserError, match="is no part of a list of hosts such as"):
        host_names("SLURM_JOB_NODELIST", text)


def test_other_lists_have_the_limit_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = MOST_HOSTS + 1
    with pytest.raises(UserError, match=r"SLURM_TASKS_PER_NODE names .* hosts, and a job has 65,536 at most"):
        slurm_counts("SLURM_TASKS_PER_NODE", "1(x999999),1(x999999)")
    assert "LSB_MCPU_HOSTS names 65,537 hosts" in refused(
        {**LSF, "LSB_MCPU_HOSTS": " ".join(f"h{number} 1" for number in range(many))}
    )
    assert "a host has 1,024 at most" in refused({**LSF, "LSB_MCPU_HOSTS": f"host-a {'9' * 30}"})
    assert "is no number of slots" in refused({**LSF, "LSB_MCPU_HOSTS": f"host-a {'9' * 5000}"})
    assert at(BATCH, host=Here(name="gpu01")).cluster.this == 0
