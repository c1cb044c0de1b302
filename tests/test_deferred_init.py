"""Initial weights: those of one process, bit for bit, on every layout, and never the whole model on a rank."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from recorded_models import HUGGING_FACE, LAYERS, REFUSED
from small_tasks import Points
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.parallel.deferred_init import InitialModel, build_recorded, move

Make = Callable[[], nn.Module]
CPU = torch.device("cpu")


def seeded(make: Make) -> Make:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return make()

    return made


def both(make: Make) -> tuple[nn.Module, InitialModel]:
    """The model built as always, and recorded; the generator must stand at the same place afterwards."""
    with torch.random.fork_rng(devices=[]):
        plain = seeded(make)()
        after = torch.get_rng_state()
        built = build_recorded(seeded(make))
        assert torch.equal(torch.get_rng_state(), after)
    return plain, built


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, also tied ones under each name, and buffers, also those that are not saved."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def assert_same(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].stride() == tensor.stride(), name
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("name", [*LAYERS, *HUGGING_FACE])
def test_values_are_those_of_one_process(name: str) -> None:
    plain, built = both({**LAYERS, **HUGGING_FACE}[name])
    assert built.values is not None, built.whole_because
    # Each alone, in any order, and twice.
    names = list(built.values.regions)
    assert names == [each for each, _ in plain.named_parameters(remove_duplicate=False)]
    for each in reversed(names):
        parameter = plain.get_parameter(each)
        assert torch.equal(built.values.value(each), parameter), each
        assert torch.equal(built.values.value(each), parameter), each
    assert all(parameter.is_meta for parameter in built.model.parameters())
    tied = len(list(plain.parameters()))
    built.values.fill(built.model, CPU)
    assert_same(tensors_of(built.model), tensors_of(plain))
    assert len(list(built.model.parameters())) == tied
    assert [p.requires_grad for p in built.model.parameters()] == [p.requires_grad for p in plain.parameters()]


@pytest.mark.parametrize("name", [*REFUSED])
def test_what_cannot_be_recorded_is_built_whole(name: str) -> None:
    plain, built = both(REFUSED[name])
    assert built.values is None
    assert built.whole_because
    if name != "lazy":
        assert_same(tensors_of(built.model), tensors_of(plain))


class Kept(nn.Module):
    """Keeps tensors where neither parameters nor buffers are, and looks at values while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5, 3))
        self.scale = torch.rand(3)
        self.several = [torch.linspace(0, 1, 4), {"deep": torch.rand(2) * self.scale[1:]}]
        half = torch.full((2,), 0.5)
        self.read = lambda: half
        self.rates = [rate.item() for rate in torch.rand(4)]
        self.listed = torch.rand(2, 2).tolist()
        self.count = 3 if self.weight.sum() > 0 else 4
        self.large = self.weight.detach()[self.weight.detach() > 0.5]


def test_what_is_no_parameter_has_its_values() -> None:
    plain, built = both(Kept)
    assert isinstance(plain, Kept)
    assert isinstance(built.model, Kept)
    assert built.values is not None
    assert built.model.weight.is_meta
    assert torch.equal(built.model.scale, plain.scale)
    assert torch.equal(built.model.several[0], plain.several[0])
    assert torch.equal(built.model.several[1]["deep"], plain.several[1]["deep"])
    assert torch.equal(built.model.read(), plain.read())
    assert (built.model.rates, built.model.listed, built.model.count) == (plain.rates, plain.listed, plain.count)
    assert torch.equal(built.model.large, plain.large)


def test_values_from_numpy_are_those_at_the_time() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        generator = np.random.default_rng(5)
        for parameter in model.parameters():
            drawn = generator.normal(size=tuple(parameter.shape)).astype(np.float32)
            parameter.data.copy_(torch.from_numpy(drawn))
            drawn.fill(0)  # a buffer that is used again
        return model

    plain, built = both(make)
    assert built.values is not None
    built.values.fill(built.model, CPU)
    assert_same(tensors_of(built.model), tensors_of(plain))


def test_a_model_from_a_folder_has_the_weights_of_the_folder(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    HUGGING_FACE["bert"]().save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    plain, built = both(lambda: BertForSequenceClassification.from_pretrained(tmp_path))
    assert not any(tensor.is_meta for tensor in tensors_of(built.model).values())
    assert_same(tensors_of(built.model), tensors_of(plain))


def test_a_mistake_in_a_model_is_the_models() -> None:
    def make() -> nn.Module:
        raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError, match="planted"):
        build_recorded(make)


def test_a_conversion_is_of_the_values_that_were_drawn() -> None:
    plain, built = both(LAYERS["encoder"])
    assert built.values is not None
    move(built.model, CPU, torch.float64)
    built.values.fill(built.model, CPU)
    assert_same(tensors_of(built.model), tensors_of(plain.to(torch.float64)))


def test_a_slice_by_hand_is_of_the_whole() -> None:
    plain, built = both(lambda: nn.Linear(6, 5))
    assert built.values is not None
    built.model.weight = nn.Parameter(torch.empty(5, 2, device="meta"))
    built.values.fill(built.model, CPU, {"weight": lambda whole: whole[:, 2:4]})
    assert torch.equal(built.model.weight, plain.get_parameter("weight")[:, 2:4])
    assert torch.equal(built.model.get_parameter("bias"), plain.get_parameter("bias"))


def test_a_slice_of_another_shape_is_named() -> None:
    _, built = both(lambda: nn.Linear(6, 5))
    assert built.values is not None
    with pytest.raises(ValueError, match=r"weight has shape \(5, 6\); its values have \(5, 2\)"):
        built.values.fill(built.model, CPU, {"weight": lambda whole: whole[:, 2:4]})


@pytest.fixture
def pretend_ranks() -> Iterator[Callable[[int, int], None]]:
    """Be one rank of several, of which the others are not there: whoever sends a message gets nothing back."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, of: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=of, store=FakeStore())

    yield become
    dist.destroy_process_group()


def sharded(model: nn.Module, shape: tuple[int, ...], policy: OffloadPolicy | None = None) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in [*model.children(), model]:
        fully_shard(part, mesh=mesh, offload_policy=policy or OffloadPolicy())
    return model


# Each with a mesh of its own: what DTensor remembers of a mesh is right for one rank only.
@pytest.mark.parametrize(
    ("shape", "rank", "policy"),
    [
        ((2,), 0, OffloadPolicy()),
        ((3,), 2, OffloadPolicy()),
        ((4,), 3, OffloadPolicy()),  # nothing is left of 2 rows
        ((5,), 1, CPUOffloadPolicy(pin_memory=False)),
        ((2, 3), 4, OffloadPolicy()),
    ],
)
def test_a_shard_is_its_part_of_the_values_of_one_process(
    shape: tuple[int, ...], rank: int, policy: OffloadPolicy, pretend_ranks: Callable[[int, int], None]
) -> None:
    plain, built = both(lambda: nn.Sequential(nn.Embedding(11, 7), nn.LSTM(7, 7), nn.Linear(7, 2)))
    assert built.values is not None
    pretend_ranks(rank, int(np.prod(shape)))
    sharded(built.model, shape, policy)
    built.values.fill(built.model, CPU)
    for name, parameter in built.model.named_parameters():
        # FSDP2 cuts rows as torch.chunk does; a rank beyond the last piece has none.
        whole = plain.get_parameter(name)
        pieces = dict(enumerate(whole.chunk(shape[-1])))
        mine = pieces.get(rank % shape[-1], whole[:0])
        assert torch.equal(parameter.to_local(), mine), name  # pyright: ignore[reportAttributeAccessIssue]


def peak(work: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had handed out at once during `work`, as the profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    profiler: Any = profiled.profiler
    events = profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(np.cumsum([change for _, change in changes]).max())


def test_no_rank_ever_holds_the_whole_model(pretend_ranks: Callable[[int, int], None]) -> None:
    blocks, width, ranks = 60, 160, 7
    make = seeded(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks))))
    one = width * width * 4
    pretend_ranks(1, ranks)
    assert peak(make) == blocks * one  # the measure sees what it should

    def start() -> nn.Module:
        built = build_recorded(make)
        assert built.values is not None
        sharded(built.model, (ranks,))
        built.values.fill(built.model, CPU)
        return built.model

    # Its shards (160 rows on 7 ranks: 23), one whole parameter, and 5 kB for each draw of random numbers.
    assert peak(start) < blocks * 23 * width * 4 + 1.2 * one + blocks * 6000 < 0.3 * blocks * one


class Sentences(Points):
    """Random words in three classes, told apart by a tiny BERT."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        words = torch.randint(37, (60, 5), generator=generator)
        self.pairs = [(word, word[0] % 3) for word in words[:40]]
        self.held_out = [(word, word[0] % 3) for word in words[40:]]

    def model(self) -> nn.Module:
        return HUGGING_FACE["bert"]()

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output.logits, batch)

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.logits, batch.targets


class Looking(Native):
    """Fails where a model to be sharded comes with its weights, or another without them."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        to_fill = how.layout.zero >= 2 or how.layout.pipeline > 1
        assert all(p.is_meta == to_fill for p in model.parameters())
        trainer = super().prepare(model, how)
        assert not any(tensor.is_meta for tensor in tensors_of(model).values())
        return trainer


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2x2", "dp2 fsdp2", "pp2"])
def test_bert_takes_the_step_of_one_process(layout: str) -> None:
    recipe = samestep.Recipe(task=Sentences(), batch=13, steps=4, clip=0.5, optimizer=samestep.AdamW(lr=1e-2))
    proof = samestep.verify(recipe, layout=layout, engine=Looking(), steps=4)
    assert proof.same_step, proof
