"""`samestep launch --k8s`: the manifest says what Kubeflow's training operator wants, and its pods run the launch."""

import shlex
from typing import Any

import pytest
import yaml

from samestep.cli.main import main

pytestmark = pytest.mark.quick

# The fields of kubeflow.org/v1, kind PyTorchJob, that are used here.
SPEC = {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs", "elasticPolicy"}
REPLICAS = {"replicas", "restartPolicy", "template"}


def printed(text: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["launch", "--k8s", *shlex.split(text)]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job["spec"]) <= SPEC
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        assert set(replicas) == REPLICAS
        assert [container["name"] for container in replicas["template"]["spec"]["containers"]] == ["pytorch"]
    return job


def test_a_job_of_a_fixed_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--image registry/mine:1 --job-id tuning-7 --num-nodes 3 --num-procs 8 --max-restarts 2 --engine deepspeed"
    )
    job = printed(f"{words} --chdir /job -- train.py --lr '3e-4' 'a b'", capsys)
    assert job["metadata"] == {"name": "tuning-7"}
    assert job["spec"]["nprocPerNode"] == "8"  # the API wants text
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 2}
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry/mine:1"
    own = ["--engine", "deepspeed", "--max-restarts", "2", "--chdir", "/job"]
    assert container["command"] == ["samestep", "launch", *own, "--", "train.py", "--lr", "3e-4", "a b"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm"
    assert pod["volumes"] == [{"name": mount["name"], "emptyDir": {"medium": "Memory"}}]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]


def test_the_pods_read_the_jobs_secret_from_a_file_of_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    job = printed("--image x --num-nodes 2 --secret-file /run/secrets/job -- train.py", capsys)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["samestep", "launch", "--secret-file", "/run/secrets/job", "--", "train.py"]


def test_an_elastic_job_has_no_master_and_one_pod_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    job = printed("--image x --nodes 1:4 --progress 5s -- -m package.train", capsys)
    assert job["spec"]["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 4, "rdzvBackend": "c10d"}
    (replicas,) = job["spec"]["pytorchReplicaSpecs"].values()
    assert replicas["replicas"] == 4
    (container,) = replicas["template"]["spec"]["containers"]
    own = ["--nodes", "1:4", "--progress", "5s"]
    assert container["command"] == ["samestep", "launch", *own, "--", "-m", "package.train"]
    assert "resources" not in container
    assert job["spec"]["nprocPerNode"] == "auto"
    assert list(printed("--image x -- train.py", capsys)["spec"]["pytorchReplicaSpecs"]) == ["Master"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--k8s -- train.py", "--k8s needs --image"),
        ("--k8s --image x", "there is no command to start"),
        ("--k8s --image=-x -- train.py", '--image "-x" is no image; write such as registry.example/team/name:tag'),
        ("--k8s --image=a,b -- train.py", '--image "a,b" is no image'),
        ("--k8s --image= -- train.py", '--image "" is no image'),
        ("--k8s --image x --num-nodes 0 -- train.py", '--num-nodes: "0" is out of range'),
        ("--k8s --image x --num-procs -1 -- train.py", '--num-procs: "-1" is out of range'),
        ("--k8s --image x --hostfile hosts -- train.py", "--k8s names no hosts, which Kubernetes chooses"),
        ("--k8s --image x --job-id Mine_1 -- train.py", '--job-id "Mine_1" is no name of a PyTorchJob'),
        ("--k8s --image x --nodes 0:2 -- train.py", '--nodes "0:2": the fewest and the most hosts are wanted'),
        ("--k8s --image x --nodes 1:2 --num-nodes 2 -- train.py", "--nodes and --num-nodes are both given"),
        ("--k8s --image x --engine jax -- train.py", "--engine jax: it can be torch, deepspeed"),
        ("--k8s --image x --bind tight -- train.py", "--bind tight: it can be auto, none"),
        ("--k8s --image x --heartbeat-timeout 1 -- train.py", "hosts send a heartbeat every 0.5 s; use 2 s or more"),
        ("--k8s --image x --master-port 2 --no-ssh -- train.py", "--no-ssh and --master-port would have no effect"),
        ("--k8s --image x --pass HOME -- train.py", "--pass would have no effect with --k8s"),
        ("--image x -- train.py", "--image goes with --k8s"),
    ],
)
@pytest.mark.processes
def test_a_mistake_is_one_message(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *shlex.split(words)]) == 2
    assert says in capsys.readouterr().err
