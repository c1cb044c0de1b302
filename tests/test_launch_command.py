"""`samestep launch` on this machine: ranks, their files and output, how a job ends, and what a user can get wrong."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import TOLD, await_files, processes_alive, started
from places import BATCH
from small_jobs import faults_in, losses_in

from samestep.cli import launch_options
from samestep.cli.main import main
from samestep.fault_tolerance import signals
from samestep.launch.device import accelerators
from samestep.launch.options import LaunchRequest

TESTS = Path(__file__).parent

# PyTorch's elastic agent leaves the files of ranks that have ended to the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("folder_of_its_own"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


def launch(*words: str) -> int:
    return main(["launch", "--logs", "logs", *words])


def test_ranks_are_told_who_they_are_and_their_lines_who_wrote_them(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--num-procs", "2", "--", TOLD, "tell", "--lr", "a b", "$(id) 'x'") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[localhost {rank}] RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 GROUP_RANK=0 "
        f"MASTER_ADDR=127.0.0.1 colour=None ['--lr', 'a b', \"$(id) 'x'\"]"
        for rank in (0, 1)
    ]
    assert err == ""
    assert Path("logs/localhost/round-0/rank-1.out").read_text(encoding="utf-8").startswith("RANK=1")


def test_one_rank_writes_as_it_would_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--num-procs", "1", "--", TOLD, "tell") == 0
    assert capfd.readouterr().out.startswith("RANK=0 WORLD_SIZE=1")


def test_output_into_files_alone_and_variables_of_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    Path(".samestep_env").write_text("# ours\nSAMESTEP_COLOUR='deep red'\n", encoding="utf-8")
    Path("elsewhere").mkdir()
    here = Path.cwd()
    assert launch("--num-procs", "1", "--output", "files", "--chdir", "elsewhere", "--", TOLD, "tell") == 0
    assert Path.cwd() == here
    assert capfd.readouterr().out == ""
    log = Path("elsewhere/logs/localhost/round-0/rank-0.out")
    assert "colour=deep red" in log.read_text(encoding="utf-8")


def test_a_module_and_a_program_run_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--num-procs", "1", "--", "-m", "platform") == 0
    assert launch("--num-procs", "1", "--", "echo", "--lr", "3") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "--lr 3"


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("raise", ["rank 1 on localhost failed first: exit code 1", "ValueError: planted in rank 1", "rank-1.err"]),
        ("lose", ["rank 1 on localhost failed first", "ValueError: planted in rank 1", "rank-1.err"]),
        (
            "kill",
            ["rank 1 on localhost failed first: its process was ended by SIGKILL: by the kernel if"],
        ),
    ],
)
def test_the_rank_that_failed_first_is_named_once(
    way: str, says: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("--num-procs", "2", "--output", "files", "--", TOLD, way) == 1
    err = capfd.readouterr().err
    assert all(text in err for text in says), err
    assert err.count("samestep: ") == 1
    assert err.count("Traceback") == (0 if way == "kill" else 1)
    assert "about to fail" not in err


def test_exit_codes_and_restarts(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--num-procs", "2", "--", TOLD, "exit", "2") == 2
    assert launch("--num-procs", "2", "--", TOLD, "exit", "7") == 1
    assert "exit code 7" in capfd.readouterr().err
    assert launch("--num-procs", "1", "--max-restarts", "1", "--", TOLD, "once") == 0
    rounds = [file.read_text(encoding="utf-8") for file in sorted(Path("logs/localhost").glob("*/rank-0.err"))]
    assert rounds[-2:] == ["rank 0 fails the first time\n", ""]


def test_a_jobs_mistake_is_told_though_another_rank_ends_first(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("recipe: {task: nowhere, batch: 4, steps: 1}\nrun: {layout: dp2}\n", encoding="utf-8")
    assert launch("--num-procs", "2", "--output", "files", "--", "-m", "samestep", "train", "job.yaml") == 2
    err = capfd.readouterr().err
    assert re.fullmatch(r"samestep: [^\n]*nowhere[^\n]*\n", err)


JOB = """
recipe: {task: regression, precision: fp64, batch: 16, steps: 4, optimizer: {name: sgd, lr: 0.01}}
run: {layout: dp2, folder: FOLDER, log: []}
"""


@pytest.mark.slow
def test_a_job_of_samesteps_starts_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"  # in which no other job makes copies
    memory.mkdir()
    monkeypatch.setattr("samestep.fault_tolerance.scratch._IN_MEMORY", memory)
    alone = JOB.replace("regression", f"{TESTS}/small_tasks.py:Unscored").replace("FOLDER", "alone")
    Path("job.yaml").write_text(alone.replace("dp2", "single"), encoding="utf-8")
    assert main(["train", "job.yaml", "--set", "recipe.steps=5"]) == 0
    waits = f"{TESTS}/held_tasks.py:AfterCopy, args: {{memory: {memory}, step: 2}}"
    Path("job.yaml").write_text(JOB.replace("regression", waits).replace("FOLDER", "run"), encoding="utf-8")
    # On one host as on many: a fault is written down, and the state comes back from the host's memory.
    words = ["train", "--num-procs", "2", "job.yaml", "--max-restarts", "1"]
    words += ["--set", "run.checkpoint={every: 1000, memory: 2}"]
    assert main([*words, "--set", "run.inject={rank: 1, step: 3, fault: kill}"]) == 0
    assert losses_in(Path("run")) == pytest.approx(losses_in(Path("alone"))[:4], rel=1e-12)
    out, err = capfd.readouterr()
    assert "[localhost 0] " in out
    assert all(Path(f"run/logs/localhost/round-{number}/rank-1.out").exists() for number in (0, 1))
    (fault,) = faults_in(Path("run"))
    assert (fault["rank"], fault["step"], fault["host"], "SIGKILL" in fault["cause"]) == (1, 3, "localhost", True)
    assert (fault["goes_on_at"], fault["steps_lost"]) == (2, 1)
    assert re.findall(rf"goes on from {memory}/samestep-memory-\w+/step-(\d+), after", err) == ["2"]
    assert "samestep: rank 1 on localhost failed in step 3: " in err


@pytest.mark.parametrize(
    ("words", "restarts"),
    [([], 3), (["--max-restarts", "0"], 0), (["--set", "run.max_restarts=0"], 0), (["--max-restarts", "2"], 2)],
)
def test_the_restarts_that_a_job_says_hold_for_its_launch(
    words: list[str], restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LaunchRequest] = []

    def launch(options: object, found: object, wanted: LaunchRequest) -> int:
        asked.append(wanted)
        return 0

    monkeypatch.setattr(launch_options, "launch", launch)
    Path("job.yaml").write_text(JOB.replace("FOLDER", "run"), encoding="utf-8")
    Path("hosts").write_text("a slots=1\nb slots=1\n", encoding="utf-8")
    assert main(["train", "job.yaml", "--hostfile", "hosts", "--nodes", "1:2", *words]) == 0
    assert [each.ranks.restarts(elastic=True) for each in asked] == [restarts]


def test_a_training_says_which_hosts_of_its_allocation_it_leaves_idle(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(JOB.replace("FOLDER", "run").replace("dp2", "single"), encoding="utf-8")
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "job.yaml"]) == 0
    assert capfd.readouterr().err.startswith("samestep: this slurm job has 3 hosts, and the training takes this one")


def test_a_job_file_that_is_not_there_is_named_before_any_rank_starts(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--num-procs", "1", "--", "-m", "samestep", "train", "nowhere.yaml"]) == 2
    assert re.fullmatch(r"samestep: there is no job file nowhere.yaml in \S+ on \S+\n", capfd.readouterr().err)


def test_what_ranks_write_is_in_the_runs_folder_and_told_there(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB.replace("folder: FOLDER, ", "").replace("dp2", "single"), encoding="utf-8")
    Path("runs/job/logs").mkdir(parents=True)  # of a run before
    assert (
        main(["train", "job.yaml", "--num-procs", "1", "--set", "run.inject={rank: 0, step: 2, fault: raise}"]) == 1
    )
    assert "all that it wrote: localhost:runs/job-2/logs/localhost/round-0/rank-0.err\n" in capfd.readouterr().err
    assert "InjectedFaultError" in Path("runs/job-2/logs/localhost/round-0/rank-0.err").read_text(encoding="utf-8")
    assert losses_in(Path("runs/job-2"))
    assert [path.name for path in sorted(Path("runs").iterdir())] == ["job", "job-2"]


def test_a_file_in_place_of_the_runs_folder(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB.replace("FOLDER", "job.yaml"), encoding="utf-8")
    assert main(["train", "job.yaml", "--num-procs", "2"]) == 2
    says = "samestep: run.folder is job.yaml: job.yaml is a file; use a folder, or a new path\n"
    assert capfd.readouterr().err == says


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_on_one_host_too(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB.replace("FOLDER", "run"), encoding="utf-8")
    words = ["--num-procs", "2", "--set", "run.hang_limit=2", "--set", "run.inject={rank: 1, step: 2, fault: hang}"]
    assert main(["train", "job.yaml", *words]) == 1
    err = capfd.readouterr().err
    assert "samestep: rank 1 on localhost failed first: it hung, and was ended\nit hung in step 2: no rank" in err
    assert "injection.py" in err
    assert "memory runs out" not in err
    assert "it hung in step 2" in Path("run/faults.jsonl").read_text(encoding="utf-8")


def test_a_job_is_checked_with_the_ranks_that_the_hosts_give(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB.replace("FOLDER", "run"), encoding="utf-8")
    Path("hosts").write_text("no-such-host-1 slots=2\nno-such-host-2 slots=1\n", encoding="utf-8")
    assert main(["train", "job.yaml", "--hostfile", "hosts"]) == 2
    assert 'layout "dp2" needs 2 processes, not 3' in capfd.readouterr().err


@pytest.mark.skipif(accelerators() > 0, reason="this host has an accelerator")
@pytest.mark.parametrize(
    ("hosts", "words", "says"),
    [
        ("no-such-host-1\nno-such-host-2\n", [], "towards no-such-host-1 can't be found"),
        ("no-such-host-1\nno-such-host-2\n", ["--device", "cpu"], "fp16, which needs an accelerator"),
        ("localhost\nno-such-host-2\n", [], "fp16, which needs an accelerator"),
    ],
    ids=["other hosts", "their CPUs", "this host too"],
)
def test_other_hosts_may_have_accelerators(
    hosts: str, words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = JOB.replace("FOLDER", "run").replace("fp64", "fp16")
    Path("job.yaml").write_text(text, encoding="utf-8")
    Path("hosts").write_text(hosts.replace("\n", " slots=1\n"), encoding="utf-8")
    assert main(["train", "job.yaml", "--hostfile", "hosts", *words]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_ranks(number: signal.Signals, code: int) -> None:
    with started("--num-procs", "2", "--", TOLD, "wait", "here") as process:
        await_files("here-0", "here-1")
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.rstrip().endswith(f"samestep: stopped by signal {int(number)}")


@pytest.mark.slow
def test_a_second_signal_ends_ranks_that_take_no_notice() -> None:
    with started("--num-procs", "2", "--", TOLD, "deaf", "here") as process:
        await_files("here-0", "here-1")
        process.send_signal(signal.SIGINT)
        await_files("here-0-told", "here-1-told")
        # Signals that follow each other sooner count as one, by the agent's own clock: nothing that is seen from
        # outside changes when the time is over. It has begun, since both ranks were told.
        time.sleep(signals.SECOND_SIGNAL)
        assert sum("-u" in each.cmdline() for each in processes_alive()) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system doesn't end processes with their parents")
def test_ranks_end_with_an_agent_that_is_killed() -> None:
    with started("--num-procs", "2", "--", TOLD, "deaf", "here") as process:
        await_files("here-0", "here-1")
        process.kill()


WRONG = [
    (["--"], "no command to start; write it after --"),
    (["--", "nowhere.py"], "there is no script nowhere.py in "),
    (["--", "no-such-program"], "there is no program no-such-program"),
    (["--", "-m"], "-m names no module"),
    (["--engine", "jax", "--", TOLD], "--engine jax: it can be torch, deepspeed"),
    (["--bind", "tight", "--", TOLD], "--bind tight: it can be auto, none"),
    (["--num-procs", "0", "--", TOLD], '--num-procs: "0" is out of range; use a whole number from 1 to 1,024'),
    (
        ["--num-procs", "two", "--", TOLD],
        'argument --num-procs: "two" is no whole number; use a whole number from 1 to 1,024',
    ),
    (["--threads", "0", "--", TOLD], '--threads: "0" is out of range; use a whole number from 1 to 1,024'),
    (
        ["--max-restarts", "-1", "--", TOLD],
        '--max-restarts: "-1" is out of range; use a whole number from 0 to 10,000',
    ),
    (["--start-timeout", "soon", "--", TOLD], '--start-timeout: "soon" is no time; use seconds above 0'),
    (["--grace-period", "0", "--", TOLD], '--grace-period: "0" is no time; use seconds above 0'),
    (
        ["--master-port", "99999", "--", TOLD],
        '--master-port: "99999" is out of range; use a whole number from 1 to 65,535',
    ),
    (
        ["--num-procs", "1", "--logs", "/dev/null", "--", TOLD],
        "can't be kept in /dev/null/localhost: a file is in the place of a folder there",
    ),
    (["--chdir", "/nowhere", "--", TOLD], "the folder /nowhere: No such file or directory; use --chdir FOLDER"),
    (["--job-id", "a b", "--", TOLD], '--job-id is "a b"; use letters, digits, dots'),
    (["--output", "printer", "--", TOLD], "invalid choice: 'printer'"),
    (["--ssh", "ssh 'x", "--", TOLD], "--ssh ssh 'x: a quote has no end"),
    (["--ssh", "", "--", TOLD], "--ssh is empty; a command is wanted"),
    (["--nodes", "3:1", "--", TOLD], '--nodes "3:1": the fewest and the most hosts are wanted, such as 1:4'),
    (["--nodes", "1:4", "--", TOLD], "--nodes 1:4, and there is this host alone; --hostfile names others"),
    (["--node-rank", "1", "--", TOLD], "--node-rank goes with --no-ssh"),
    (["--hostfile", "nowhere", "--", TOLD], "--hostfile nowhere: no such file"),
    (["--no-ssh", "--", TOLD], "--no-ssh needs to know how many hosts there are"),
    (["--no-ssh", "--num-nodes", "2", "--nodes", "1:2", "--", TOLD], "--nodes and --num-nodes are both given"),
    (["--no-ssh", "--num-nodes", "2", "--", TOLD], "which of the 2 hosts is this? use --node-rank 0 to 1"),
    (["--no-ssh", "--num-nodes", "2", "--node-rank", "2", "--", TOLD], "--node-rank is 2, and 2 hosts have"),
    (["--no-ssh", "--num-nodes", "2", "--node-rank", "1", "--", TOLD], "--master-addr and the address of the host"),
    (
        ["--no-ssh", "--num-nodes", "0", "--node-rank", "0", "--", TOLD],
        '--num-nodes: "0" is out of range; use a whole number from 1 to 1,048,576',
    ),
    (
        ["--no-ssh", "--num-nodes", "-2", "--node-rank", "0", "--", TOLD],
        '--num-nodes: "-2" is out of range; use a whole number from 1 to 1,048,576',
    ),
    (["--join-timeout", "later", "--", TOLD], '--join-timeout: "later" is no time; use seconds above 0'),
    (["--rejoin-timeout", "-1", "--", TOLD], '--rejoin-timeout: "-1" is no time; use seconds above 0'),
    (["--heartbeat-timeout", "soon", "--", TOLD], '--heartbeat-timeout: "soon" is no time; use seconds above 0'),
    (["--device", "gpu", "--", TOLD], "argument --device: invalid choice: 'gpu'"),
    (["--remote-python", "", "--", TOLD], "--remote-python is empty; a command is wanted"),
    (
        ["--ray", "auto", "--remote-python", "python3", "--", TOLD],
        "--remote-python is for hosts reached by SSH or srun",
    ),
    (["--pass", "NOT_SET_ANYWHERE", "--", TOLD], "--pass NOT_SET_ANYWHERE: it is not set here"),
    (["--pass", "A=B", "--", TOLD], '--pass "A=B" is no name of a variable'),
]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "is UTF-16; save it as UTF-8"),
        (b"\xff", "is not UTF-8: byte 0 is 0xff"),
        (b"NO VALUE\n", ".samestep_env, line 1: a line such as"),
    ],
)
def test_a_file_of_variables_that_cannot_be_read_is_named(
    content: bytes, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(".samestep_env").write_bytes(content)
    assert main(["launch", "--num-procs", "1", "--", TOLD, "tell"]) == 2
    err = capfd.readouterr().err
    assert re.fullmatch(r"samestep: [^\n]*\n", err)
    assert ".samestep_env" in err
    assert says in err


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words[:-1]) or "nothing" for words, _ in WRONG])
def test_a_mistake_is_one_message(words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    err = capfd.readouterr().err
    assert re.fullmatch(r"samestep: [^\n]*\n", err)
    assert says in err
