"""Training on several hosts, started on each of them as torchrun has it: the losses of one process, to rounding."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from on_hosts import SAME, VARIABLES, follow, needs_hosts, proved, python, record, start_on, torchrun
from small_jobs import job_file, losses_alone, losses_in, steps_in
from testbed import Cable, Testbed

from samestep.launch.network import interface_of, loopback_interface

pytestmark = needs_hosts(ssh=False)

TRAIN = "torchrun --nnodes=2 --node-rank=N --master-addr=host-a -m samestep train job.yaml"


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(2, ssh=False) as made:
        yield made


def train_on(
    bed: Testbed, folder: Path, *options: str, ranks: tuple[int, ...] = (1, 1), limit: float = 120, **recipe: Any
) -> float:
    """Train the job on as many ranks of each host, and return the seconds to the first step."""
    train = ["samestep", "train", str(job_file(folder, **recipe)), "--folder", str(folder / "run"), *options]
    commands = [torchrun(rank, len(ranks), train, ranks=count) for rank, count in enumerate(ranks)]
    return follow(start_on(bed.hosts[: len(ranks)], commands), folder / "run", limit=limit)


def same_losses(folder: Path, rel: float = 1e-12, **recipe: Any) -> None:
    assert losses_in(folder) == pytest.approx(losses_alone(**recipe), rel=rel)


@pytest.mark.cluster
def test_replicas_on_two_hosts_take_the_steps_of_one_process(bed: Testbed, tmp_path: Path) -> None:
    first = train_on(bed, tmp_path, "--layout", "dp2")
    same_losses(tmp_path / "run")
    record("torchrun", TRAIN + " --layout dp2", "2 hosts, a rank each", SAME, first)


@pytest.mark.cluster
@pytest.mark.parametrize("layout", ["fsdp2", "pp2", "zero2x2", "dp2"])
def test_a_layout_over_two_hosts_is_proved(bed: Testbed, tmp_path: Path, layout: str) -> None:
    first = train_on(bed, tmp_path, "--layout", layout)
    same_losses(tmp_path / "run")
    record("torchrun", f"{TRAIN} --layout {layout}", f"{layout} over 2 hosts", SAME, first)
    found = tmp_path / "proof.json"
    verify = ["samestep", "verify", str(job_file(tmp_path)), "--layout", layout, "--json", str(found), "--force"]
    for command in start_on(bed.hosts, [torchrun(rank, 2, verify) for rank in range(2)]):
        command.finish(90)
    command = f"{TRAIN.replace('samestep train', 'samestep verify')} --layout {layout}"
    record("torchrun", command, f"proof of {layout}", proved(found))


@pytest.mark.cluster
def test_hosts_may_hold_different_numbers_of_ranks(bed: Testbed, tmp_path: Path) -> None:
    first = train_on(bed, tmp_path, "--layout", "dp3", ranks=(1, 2))
    same_losses(tmp_path / "run")
    record("torchrun", TRAIN + " --layout dp3", "1 rank on one host, 2 on the other", SAME, first)


@pytest.mark.cluster
def test_hosts_meet_by_an_elastic_rendezvous(bed: Testbed, tmp_path: Path) -> None:
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=host-a:29400", "--rdzv-id=job", "-m"]
    train = ["samestep", "train", str(job_file(tmp_path)), "--layout", "dp2", "--folder", str(tmp_path / "run")]
    command = python("torch.distributed.run", *meeting, *train)
    first = follow(start_on(bed.hosts, [command] * 2), tmp_path / "run", limit=90)
    same_losses(tmp_path / "run")
    record("torchrun", "torchrun --rdzv-backend=c10d ... -m samestep train job.yaml", "2 hosts", SAME, first)


# Engine -> the package that it needs, what of the job it wants otherwise, and how near its losses come then.
ENGINES: dict[str, tuple[str, dict[str, Any], float]] = {
    "horovod": ("horovod", {}, 1e-12),
    "keras-multi-worker": ("tf_keras", {"task": "regression"}, 1e-12),
    "deepspeed": ("deepspeed", {"precision": "fp32"}, 1e-5),
    "accelerate": ("accelerate", {}, 1e-12),
}


@pytest.mark.cluster
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_meets_across_hosts(bed: Testbed, tmp_path: Path, engine: str) -> None:
    package, recipe, rel = ENGINES[engine]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    first = train_on(bed, tmp_path, "--layout", "dp2", "--engine", engine, **recipe)
    same_losses(tmp_path / "run", rel, **recipe)
    seen = SAME if rel < 1e-9 else f"{SAME}, to {rel:.0e} in float32"
    record("torchrun", f"{TRAIN} --layout dp2 --engine {engine}", f"engine {engine}", seen, first)


@pytest.mark.cluster
def test_keras_meets_hosts_that_find_their_own_names_on_the_loopback(tmp_path: Path) -> None:
    package, recipe, rel = ENGINES["keras-multi-worker"]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with Testbed(2, ssh=False, own_name_on_loopback=True) as debian:
        first = train_on(debian, tmp_path, "--layout", "dp2", "--engine", "keras-multi-worker", **recipe)
    same_losses(tmp_path / "run", rel, **recipe)
    tried = "engine keras-multi-worker, hosts that find their own names on the loopback"
    record("torchrun", f"{TRAIN} --layout dp2 --engine keras-multi-worker", tried, SAME, first)


@pytest.mark.cluster
def test_horovod_is_refused_on_hosts_that_find_their_own_names_on_the_loopback(tmp_path: Path) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("horovod is not installed")
    train = ["samestep", "train", str(job_file(tmp_path)), "--layout", "dp2", "--engine", "horovod"]
    with Testbed(2, ssh=False, own_name_on_loopback=True) as debian:
        commands = start_on(debian.hosts, [torchrun(rank, 2, train) for rank in range(2)])
        assert commands[0].wait(120) != 0
        said = "engine horovod: on host-a the name host-a leads to no address that other hosts reach"
        assert said in commands[0].text
    tried = "engine horovod, hosts that find their own names on the loopback"
    record("torchrun", f"{TRAIN} --layout dp2 --engine horovod", tried, "refused before the first step")


@pytest.mark.cluster
def test_hosts_that_find_their_own_names_on_the_loopback_still_meet(tmp_path: Path) -> None:
    with Testbed(3, ssh=False, own_name_on_loopback=True) as debian:
        first = train_on(debian, tmp_path, "--layout", "dp3", ranks=(1, 1, 1))
    same_losses(tmp_path / "run")
    tried = "3 hosts that find their own names on the loopback (127.0.1.1)"
    record("torchrun", TRAIN.replace("--nnodes=2", "--nnodes=3") + " --layout dp3", tried, SAME, first)


@pytest.mark.cluster
@pytest.mark.parametrize("known", [False, True], ids=["hosts unknown", "hosts known"])
def test_agents_whose_first_host_finds_its_name_on_the_loopback(known: bool, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host-a slots=1\nhost-b slots=1\n", encoding="utf-8")
    nodes = ["--hostfile", str(tmp_path / "hosts")] if known else ["--num-nodes", "2", "--num-procs", "1"]
    meeting = ["--no-ssh", *nodes, "--master-addr", "host-a", "--start-timeout", "30s"]
    train = ["train", str(job_file(tmp_path)), "--layout", "dp2", "--folder", str(tmp_path / "run"), *meeting]
    with Testbed(2, ssh=False, own_name_on_loopback=True) as debian:
        both = [python("samestep", *train, "--node-rank", str(rank)) for rank in range(2)]
        if known:
            follow(start_on(debian.hosts, both), tmp_path / "run", limit=120)
            same_losses(tmp_path / "run")
            return
        (first,) = start_on(debian.hosts[:1], both[:1])
        assert first.wait(20) == 2
        assert "host-a leads to 127.0.1.1 on host-a itself, where no other host reaches it; " in first.text


@pytest.mark.cluster
def test_a_host_without_the_runs_folder_makes_one_for_what_its_ranks_write(bed: Testbed, tmp_path: Path) -> None:
    host_b, runs = bed["host-b"], tmp_path / "runs"
    (runs / "job" / "of another run").mkdir(parents=True)
    host_b.own_folder(runs)
    meeting = ["--no-ssh", "--num-nodes", "2", "--num-procs", "1", "--master-addr", "host-a"]
    train = ["train", str(job_file(tmp_path)), "--layout", "dp2", *meeting]
    commands = [
        host.start(python("samestep", *train, "--node-rank", str(rank)), env=VARIABLES, cwd=tmp_path)
        for rank, host in enumerate(bed.hosts)
    ]
    follow(commands, runs / "job-2", limit=120)
    same_losses(runs / "job-2")
    assert [path.name for path in (runs / "job-2" / "logs").iterdir()] == ["host-a"]
    assert (runs / "job-2" / "logs" / "host-a" / "round-0" / "rank-0.out").is_file()
    there = host_b.run(["find", str(runs), "-type", "f"]).stdout
    host_b.run(["umount", str(runs)])
    log = runs / "job-2" / "logs" / "host-b" / "round-0" / "rank-1"
    assert sorted(there.splitlines()) == [f"{log}.err", f"{log}.out"]


@pytest.mark.cluster
def test_two_jobs_share_the_hosts(bed: Testbed, tmp_path: Path) -> None:
    commands = []
    for name, port in (("one", 29601), ("two", 29602)):
        (tmp_path / name).mkdir()
        train = ["samestep", "train", str(job_file(tmp_path / name)), "--layout", "dp2"]
        for rank in range(2):
            command = torchrun(rank, 2, [*train, "--folder", str(tmp_path / name / "run")])
            commands.append([part.replace("29500", str(port)) for part in command])
    follow(start_on([*bed.hosts, *bed.hosts], commands), tmp_path / "two" / "run", limit=120)
    for name in ("one", "two"):
        same_losses(tmp_path / name / "run")
    record("torchrun", TRAIN, "2 jobs at once on the same 2 hosts", f"both have {SAME}")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("cable", "named"),
    [
        (Cable(rate_mbit=20), "20 Mbit/s"),
        (Cable(delay_ms=20), "20 ms each way"),
        (Cable(delay_ms=5, loss=0.01), "5 ms each way and 1 % of frames lost"),
    ],
)
def test_a_slow_link_changes_nothing_but_the_time(tmp_path: Path, cable: Cable, named: str) -> None:
    with Testbed(2, racks=2, cable=cable, ssh=False) as far:
        first = train_on(far, tmp_path, "--layout", "dp2")
    same_losses(tmp_path / "run")
    record("torchrun", TRAIN + " --layout dp2", f"2 hosts with {named} between them", SAME, first)


@pytest.mark.cluster
def test_a_checkpoint_folder_that_is_not_shared_is_named_at_once(bed: Testbed, tmp_path: Path) -> None:
    host_b = bed["host-b"]
    (tmp_path / "saved").mkdir()
    host_b.own_folder(tmp_path / "saved")
    train = ["samestep", "train", str(job_file(tmp_path)), "--layout", "dp2", "--folder", str(tmp_path / "run")]
    train += ["--checkpoint-every", "2", "--set", f"run.checkpoint.folder={tmp_path / 'saved'}"]
    commands = start_on(bed.hosts, [torchrun(rank, 2, train) for rank in range(2)])
    assert commands[0].wait(90) == 1
    host_b.run(["umount", str(tmp_path / "saved")])
    commands[1].wait(60)
    said = f"host-b (rank 1) doesn't see what host-a writes into {tmp_path / 'saved'}; use run.checkpoint.folder on a"
    assert commands[0].text.count(said) == 1, commands[0].text
    assert steps_in(tmp_path / "run") == 0
    assert list((tmp_path / "saved").iterdir()) == []
    record("torchrun", TRAIN, "a checkpoint folder that the hosts don't share", "refused before the first step")


def test_an_interface_is_found_by_its_address() -> None:
    loopback = loopback_interface()
    assert interface_of("127.0.0.1") == loopback
    assert interface_of("192.0.2.1") is None  # an address for documents
    assert interface_of("2001:db8::1") is None
    # IPv6 may be turned off, for all interfaces or for this one.
    has_it = any(each.address == "::1" for each in psutil.net_if_addrs().get(loopback or "", []))
    assert interface_of("::1") == (loopback if has_it else None)
