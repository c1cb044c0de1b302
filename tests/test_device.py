"""Which accelerator a rank takes and over which back end, on hosts whose accelerators are only pretended."""

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pretended
import pytest
import torch
import torch.distributed as dist
from small_tasks import Points
from torch import nn

import samestep.api
from samestep.errors import UserError
from samestep.handwritten import training as handwritten
from samestep.job import Job, Run
from samestep.launch import agent, device
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import RankOptions
from samestep.ranks import Ranks
from samestep.recipe import Recipe
from samestep.verification import proof

pytestmark = pytest.mark.quick


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host whose accelerators are as many as the variable names; 4 without it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretended.accelerators(monkeypatch, otherwise=4)
    return monkeypatch


def test_a_rank_takes_the_accelerator_of_its_local_rank(visible: pytest.MonkeyPatch) -> None:
    for in_a_rank in (False, True):
        device.check_devices(4, in_a_rank=in_a_rank)
    assert [device.device_of(rank) for rank in range(4)] == [torch.device("cuda", rank) for rank in range(4)]
    assert device.device_of(3, "cpu") == torch.device("cpu")
    visible.setenv("CUDA_VISIBLE_DEVICES", "6,2")
    assert device.device_of(1) == torch.device("cuda", 1)


def test_ranks_share_accelerators_where_messages_go_through_the_host(visible: pytest.MonkeyPatch) -> None:
    device.check_devices(6, may_share=True)
    device.check_devices(6, in_a_rank=True, may_share=True)
    assert [device.device_of(rank).index for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert device.backend_of(torch.device("cuda", 0), gloo_alone=True) == "cpu:gloo,cuda:gloo"
    assert device.backend_of(torch.device("cpu"), gloo_alone=True) == "gloo"


def test_a_rank_that_sees_its_own_accelerator_alone_takes_that(visible: pytest.MonkeyPatch) -> None:
    visible.setenv("CUDA_VISIBLE_DEVICES", "3")  # as a scheduler sets it for local rank 3 of 4
    device.check_devices(4, in_a_rank=True)
    assert device.device_of(3) == torch.device("cuda", 0)


def test_more_ranks_than_accelerators_are_refused(visible: pytest.MonkeyPatch) -> None:
    for in_a_rank in (False, True):
        with pytest.raises(UserError, match="5 processes on this host, which has 4 accelerators; ask for 4 or fewer"):
            device.check_devices(5, in_a_rank=in_a_rank)
    device.check_devices(5, "cpu")
    visible.setenv("CUDA_VISIBLE_DEVICES", "3")
    # Whoever starts the ranks here would have all of them see the same one.
    with pytest.raises(UserError, match="4 processes on this host, which has 1 accelerator; ask for 1 or fewer"):
        device.check_devices(4)
    visible.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(UserError, match="which has 2 accelerators"):
        device.check_devices(4, in_a_rank=True)


def test_slots_beyond_a_hosts_accelerators_are_refused(visible: pytest.MonkeyPatch) -> None:
    device.check_slots("worker-2", 4, None)
    device.check_slots("worker-2", 2, (0, 3))
    with pytest.raises(
        UserError, match="worker-2: 5 slots are asked for, and there are 4 accelerators; use 4 or fewer"
    ):
        device.check_slots("worker-2", 5, None)
    visible.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    device.check_slots("worker-2", 2, (0, 1))
    says = "worker-2: slot 3, counted from 0, is asked for, .* 2 accelerators that CUDA_VISIBLE_DEVICES=6,7 leaves"
    with pytest.raises(UserError, match=f"{says}; use slots 0 to 1"):
        device.check_slots("worker-2", 2, (0, 3))
    visible.setenv("CUDA_VISIBLE_DEVICES", "")
    device.check_slots("worker-2", 8, None)  # slots are places on its cores


def test_an_agent_refuses_such_slots_before_a_rank_starts(visible: pytest.MonkeyPatch) -> None:
    visible.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    asked = NodeSpec(
        job="one", host="worker-2", num_procs=1, chosen=(2,), command=(__file__,), ranks=RankOptions(logs="logs")
    )
    outcome = agent.run(asked)
    assert outcome.exit_code == 2
    assert "worker-2: slot 2, counted from 0, is asked for" in (outcome.message or "")


def test_the_reference_of_a_proof_leaves_its_devices_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models: list[weakref.ref[nn.Module]] = []
    left: list[bool] = []

    class Noted(Points):
        def model(self) -> nn.Module:
            model = super().model()
            models.append(weakref.ref(model))
            return model

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: left.append(all(each() is None for each in models)))
    release = device.release_memory
    # The steps are taken on the CPU, and its memory is left as an accelerator's.
    monkeypatch.setattr(proof, "release_memory", lambda _: release(torch.device("cuda", 0)))
    task = Noted(samples=20)
    job = Job(recipe=Recipe(task=task, batch=10, steps=1), run=Run(device="cpu", threads=1))
    proof.reference(proof.proof_job(job), task, 1, tmp_path)
    assert models
    assert left == [True]


def test_the_reference_of_a_proof_may_take_its_steps_on_the_cpu(visible: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class StartedError(Exception):
        pass

    found: list[object] = []

    def begin(job: Job, *_: object) -> None:
        found.append(device.device_of(0, job.run.device))
        raise StartedError

    visible.setattr(proof, "_reference", begin)
    visible.setattr(torch.accelerator, "empty_cache", lambda: None)
    job = Job(recipe=Recipe(task=Points(samples=20), batch=10, steps=1), run=Run(threads=1))
    for choice in ("auto", "cpu"):
        with pytest.raises(StartedError):
            proof.reference(job, Points(), 1, tmp_path, device=choice)
    assert found == [torch.device("cuda", 0), torch.device("cpu")]


def test_verify_says_where_the_reference_takes_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    found: list[object] = []

    def begin(*_: object, device: object, **__: object) -> None:
        found.append(device)
        raise StartedError

    monkeypatch.setattr(samestep.api, "reference", begin)
    recipe = Recipe(task=Points(samples=20), batch=10, steps=1)
    for chosen in ("auto", "cpu"):
        with pytest.raises(StartedError):
            samestep.verify(recipe, micro_batch=5, device="cpu", threads=1, check=False, reference_device=chosen)
    assert found == ["auto", "cpu"]


def test_a_handwritten_loop_binds_its_group_to_its_device(visible: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class JoinedError(Exception):
        pass

    given: dict[str, object] = {}

    def join(backend: str, **values: object) -> None:
        given.update(values, backend=backend)
        raise JoinedError

    visible.setattr(dist, "init_process_group", join)
    visible.setattr(torch.accelerator, "set_device_index", lambda index: None)
    job = Job(recipe=Recipe(task="regression", batch=10, steps=1), run=Run(threads=1))
    ranks = Ranks(rank=3, world_size=4, local_rank=3, local_world_size=4)
    with pytest.raises(JoinedError):
        handwritten.train(job, tmp_path, ranks=ranks, meet_at="file://nowhere")
    assert given["device_id"] == torch.device("cuda", 3)
    assert given["backend"] == "cpu:gloo,cuda:nccl"


SMDDP = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

if "smddp" not in dist.Backend.backend_list:
    dist.Backend.register_backend("smddp", create, devices=["cpu", "cuda"])
"""


@pytest.fixture
def sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A host of a SageMaker job, with a package of the name of SageMaker's that makes a back end of gloo known."""
    package = tmp_path / "smdistributed" / "dataparallel" / "torch"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "torch_smddp.py").write_text(SMDDP, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    yield monkeypatch
    for name in [name for name in sys.modules if name.partition(".")[0] == "smdistributed"]:
        del sys.modules[name]


def test_on_sagemaker_messages_take_sagemakers_own_back_end(sagemaker: pytest.MonkeyPatch) -> None:
    assert device.backend_of(torch.device("cuda", 0)) == "cpu:gloo,cuda:smddp"
    assert device.backend_of(torch.device("cpu")) == "gloo"
    dist.init_process_group("cpu:smddp", store=dist.HashStore(), rank=0, world_size=1)
    try:
        total = torch.tensor([3.0])
        dist.all_reduce(total)
        assert total.item() == 3
        assert dist.get_backend_config() == "cpu:smddp"
    finally:
        dist.destroy_process_group()
    sagemaker.delenv("SM_HOSTS")
    assert device.backend_of(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


def test_on_sagemaker_without_its_library_messages_take_the_devices_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    assert device.backend_of(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
