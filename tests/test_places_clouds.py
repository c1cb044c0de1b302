"""Hosts of SageMaker, of a PyTorchJob and of a Ray cluster; every wrong input."""

import socket
import sys
from types import ModuleType
from typing import Any

import pytest
from places import PYTORCHJOB, SAGEMAKER, Here, at, refused, slots

pytestmark = pytest.mark.quick

# SageMaker


def test_sagemaker() -> None:
    found = at(SAGEMAKER)
    assert (found.cluster.place, found.cluster.this, found.cluster.job) == ("sagemaker", 1, "reviews-2026-11-21")
    assert slots(found) == {"algo-1": 32, "algo-2": 32}
    assert (found.on_every_host, found.slots_from) == (True, "cores")
    assert slots(at({**SAGEMAKER, "SM_NUM_GPUS": "8"})) == {"algo-1": 8, "algo-2": 8}


def test_sagemaker_by_its_resource_config_alone() -> None:
    found = at({"SM_RESOURCE_CONFIG": SAGEMAKER["SM_RESOURCE_CONFIG"]}, host=Here(accelerators=4))
    assert slots(found) == {"algo-1": 4, "algo-2": 4}
    assert found.cluster.this == 1


def test_sagemaker_numbers_ten_hosts_alike_whatever_their_order() -> None:
    names = '["algo-1","algo-10","algo-2"]'
    found = at({**SAGEMAKER, "SM_HOSTS": names})
    assert list(slots(found)) == ["algo-1", "algo-2", "algo-10"]
    assert found.cluster.this == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SM_HOSTS": '["algo-1"'}, "SM_HOSTS is '[\"algo-1\"', which is not JSON"),
        ({"SM_HOSTS": "algo-1,algo-2"}, 'a list of hosts such as ["algo-1","algo-2"] is wanted'),
        ({"SM_HOSTS": "[]"}, "SM_HOSTS is []"),
        ({"SM_HOSTS": '["algo-2","algo-2"]'}, "SM_HOSTS names a host twice"),
        ({"SM_HOSTS": "[1, 2]"}, "SM_HOSTS is [1, 2]"),
        ({"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST is 'algo-3', which is none of algo-1, algo-2"),
        ({"SM_NUM_GPUS": "some"}, "SM_NUM_GPUS is 'some'"),
        ({"SM_NUM_CPUS": "0"}, "SM_NUM_CPUS is '0'; a whole number of 1 or more is wanted"),
        (
            {"SM_RESOURCE_CONFIG": "[]"},
            "SM_RESOURCE_CONFIG is '[]'; a mapping with",
        ),
        ({"SM_RESOURCE_CONFIG": "{"}, "SM_RESOURCE_CONFIG is '{', which is not JSON"),
        ({"SM_HOSTS": "", "SM_RESOURCE_CONFIG": "{}"}, '"hosts" in SM_RESOURCE_CONFIG is None'),
    ],
)
def test_wrong_sagemaker_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**SAGEMAKER, **change})


# A PyTorchJob


def test_a_pytorchjob() -> None:
    found = at(PYTORCHJOB, host=Here(name="reviews-worker-0"))
    assert (found.cluster.place, found.cluster.this) == ("pytorchjob", 1)
    assert slots(found) == {"reviews-master-0": 4, "reviews-worker-0": 4}
    assert (found.main_address, found.main_port, found.on_every_host) == ("reviews-master-0", 23456, True)


def test_a_pytorchjob_of_an_old_operator_counts_pods() -> None:
    old = {name: value for name, value in PYTORCHJOB.items() if not name.startswith("PET_")} | {"WORLD_SIZE": "3"}
    found = at(old, host=Here(name="reviews-worker-0", accelerators=2))
    assert slots(found) == {"reviews-master-0": 2, "reviews-worker-0": 2, "(host 2)": 2}


@pytest.mark.parametrize(
    ("processes", "accelerators", "expected"), [("auto", 0, 8), ("auto", 2, 2), ("gpu", 2, 2), ("cpu", 2, 8)]
)
def test_ranks_of_a_pod_in_words(processes: str, accelerators: int, expected: int) -> None:
    found = at({**PYTORCHJOB, "PET_NPROC_PER_NODE": processes}, host=Here(accelerators=accelerators))
    assert set(slots(found).values()) == {expected}


def test_an_elastic_pytorchjob_without_a_master() -> None:
    elastic = {"PET_RDZV_ENDPOINT": "reviews-worker-0:29400", "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "2"}
    found = at(elastic, host=Here(name="reviews-worker-2"))
    assert slots(found) == {"reviews-worker-0": 2, "(host 1)": 2, "reviews-worker-2": 2}
    assert (found.cluster.this, found.main_address, found.main_port) == (2, "reviews-worker-0", 29400)
    assert at(elastic, host=Here(name="elsewhere")).cluster.this is None
    assert "PET_RDZV_ENDPOINT is 'reviews'" in refused({**elastic, "PET_RDZV_ENDPOINT": "reviews"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE is 'all'; a number of 1 or more, auto, gpu or cpu"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is '0'"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "this pod has no accelerator that PyTorch can use"),
        ({"PET_NNODES": "1:2:3"}, "PET_NNODES is '1:2:3'"),
        ({"PET_NNODES": "0"}, "PET_NNODES is '0'"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2, and the job has 2 pods, counted from 0"),
        ({"PET_NODE_RANK": "", "RANK": "5"}, "RANK is 5, and the job has 2 pods"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
    ],
)
def test_wrong_pytorchjob_variables(change: dict[str, str], message: str) -> None:
    assert message in refused({**PYTORCHJOB, **change})


# Ray


def ray_node(address: str, *, alive: bool = True, head: bool = False, **resources: float) -> dict[str, Any]:
    """A node as ray.nodes() tells it."""
    marks = {f"node:{address}": 1.0, **({"node:__internal_head__": 1.0} if head else {})}
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {**marks, **resources}}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package that tells what Ray would; `nodes_there` are its nodes, `asked` where it was looked for."""
    module = ModuleType("ray")
    module.__spec__ = sys.__spec__  # found, as an installed package is
    module.nodes_there = []  # type: ignore[attr-defined]
    module.asked = []  # type: ignore[attr-defined]
    module.is_initialized = lambda: False  # type: ignore[attr-defined]
    module.init = lambda address, **_: module.asked.append(address)  # type: ignore[attr-defined]
    module.nodes = lambda: module.nodes_there  # type: ignore[attr-defined]
    module.shutdown = lambda: module.asked.append("shutdown")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def test_ray(ray: Any) -> None:
    ray.nodes_there = [
        ray_node("10.0.0.3", CPU=16.0, GPU=4.0),
        ray_node("10.0.0.9", head=True, CPU=16.0, GPU=4.0),
        ray_node("10.0.0.1", CPU=16.0, GPU=4.0, alive=False),
        ray_node("10.0.0.2", CPU=64.0),
    ]
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        for found in (at({}, ray=address), at({"RAY_ADDRESS": address})):
            assert slots(found) == {"10.0.0.9": 4, "10.0.0.3": 4}
            assert found.slots_from == "accelerators"
    assert ray.asked == [address, "shutdown"] * 2
    ray.nodes_there = [ray_node("10.0.0.2", CPU=64.0), ray_node("10.0.0.1", CPU=2.0)]
    assert slots(at({}, ray="auto")) == {"10.0.0.1": 2, "10.0.0.2": 64}


def test_ray_without_nodes_or_an_answer(ray: Any) -> None:
    assert "a Ray cluster without a live node that has a CPU" in refused({}, ray="auto")

    assert "--ray is 127.0.0.1:1, where nothing answers: " in refused({}, ray="127.0.0.1:1")
    assert "where nothing answers" in refused({"RAY_ADDRESS": "127.0.0.1:99999"})

    def nobody(address: str, **_: object) -> None:
        raise ConnectionError("could not find any running Ray instance")

    ray.init = nobody
    assert "where no Ray cluster answers: could not find any running Ray instance" in refused({}, ray="auto")


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "RAY_ADDRESS is auto, and Ray is not installed" in refused({"RAY_ADDRESS": "auto"})
