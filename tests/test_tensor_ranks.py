"""What tensor parallel ranks hold, send and draw: looked at from inside, all in one start of two ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny_texts import Encoder, Texts, llama
from torch import Tensor, nn

import samestep
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.exact.forward_context import ForwardContext, Portion
from samestep.parallel.tensor.layers import UnitRegion, multihead
from samestep.training.fit import Training

STEPS = 3
LLAMA = Texts(partial(llama, tie_word_embeddings=True), causal=True)
ENCODER = Texts(Encoder)  # drops a tenth, also of the 21 features that two ranks do not have alike


def training(world: Any, task: samestep.Task, layout: str, **values: Any) -> Training:
    recipe = samestep.Recipe(task=task, batch=10, steps=9, optimizer=samestep.AdamW(lr=1e-2), **values)
    return Training(Job(recipe=recipe, run=Run(layout=layout, threads=1)), task, world, Layout.parse(layout))


def losses(trained: Training) -> list[float]:
    return [report.loss.item() for _, report in trained.steps(stop=STEPS)]


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The sizes of the messages that one kind of collective sends."""
    sizes: list[int] = []
    real = getattr(dist, name)

    def count(*arguments: Any, **keywords: Any) -> Any:
        sizes.append(arguments[0].numel() if isinstance(arguments[0], Tensor) else arguments[1].numel())
        return real(*arguments, **keywords)

    with mock.patch.object(dist, name, count):
        yield sizes


def held(world: Any) -> dict[str, Any]:
    """Parameters of a rank, and the whole model put together again."""
    trained = training(world, LLAMA, "tp2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = LLAMA.model().state_dict()
    state = trained.session.trainer.state()
    table = trained.session.trainer._spread.parts.table  # pyright: ignore[reportAttributeAccessIssue]
    mine = dict(trained.session.trainer.model.named_parameters())  # pyright: ignore[reportAttributeAccessIssue]
    sliced = [name for name in mine if name in table and table[name].slice is not None]
    return {
        "sliced": sum(mine[name].numel() for name in sliced),
        "of": sum(whole[name].numel() for name in sliced),
        "of all": sum(whole[name].numel() for name in mine),
        "state": list(state) == list(whole) and all(torch.equal(state[name], whole[name]) for name in whole),
    }


def tokens_in_blocks(world: Any) -> dict[str, Any]:
    """How many of nine tokens a norm in a block sees, and the sliced layers after it."""
    trained = training(world, LLAMA, "tp2 sequence=split")
    model: nn.Module = trained.session.trainer.model  # pyright: ignore[reportAttributeAccessIssue]
    seen: dict[str, int] = {}
    for name in ("model.layers.1.input_layernorm", "model.layers.1.mlp.act_fn", "model.norm"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: seen.update({name: inputs[0].shape[1]})
        )
    losses(trained)
    return seen


def messages(world: Any) -> dict[str, int]:
    """Messages over the tensor group in one forward and backward of one micro-batch."""
    trained = training(world, LLAMA, "tp2")
    batch = next(iter(trained.session.batches(trained.samples, batch=10, collate=LLAMA.collate, steps=1)))
    with counted("all_reduce"), counted("all_gather"):
        trained.session.step(batch, LLAMA.loss)  # finds out whether the loss takes slices
    with counted("all_reduce") as reduced, counted("all_gather") as gathered:
        trained.session.step(batch, LLAMA.loss)
    hidden = 10 * 9 * 16  # [batch, tokens, features]
    return {"hidden": sum(size == hidden for size in reduced), "gathered": len(gathered)}


def own_loop(world: Any) -> dict[str, Any]:
    """session.prepare with and without an example."""
    session = training(world, LLAMA, "tp2").session
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        session.prepare(model, optimizer)
        refused = ""
    except samestep.UserError as error:
        refused = str(error)
    task = Texts(Encoder)
    samples = task.train_set()
    example = task.collate([samples[0], samples[1]]).inputs
    model, optimizer = session.prepare(model, optimizer, example=example)
    found = [
        session.step(batch, task.loss).loss.item()
        for batch in session.batches(samples, batch=10, collate=task.collate, steps=STEPS)
    ]
    return {"refused": refused, "losses": found, "classes": tuple(session.trainer.predict(example).shape)}


def with_dropout(world: Any, layout: str) -> dict[str, Any]:
    """Losses, and how far the ranks' copies of what is whole have come apart."""
    trained = training(world, ENCODER, layout)
    found = losses(trained)
    parts = trained.session.trainer._spread.parts  # pyright: ignore[reportAttributeAccessIssue]
    model: nn.Module = trained.session.trainer.model  # pyright: ignore[reportAttributeAccessIssue]
    apart = 0.0
    for name, parameter in model.named_parameters():
        if parts.part(name).slice is None:
            theirs = parameter.detach().clone()
            dist.broadcast(theirs, src=0)
            apart = max(apart, (theirs - parameter.detach()).abs().max().item())
    votes = torch.tensor(apart)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return {"losses": found, "apart": votes.item()}


def attention(world: Any) -> dict[str, float]:
    """nn.MultiheadAttention on slices against itself: the largest difference of outputs, weights and gradients."""
    generator = torch.Generator().manual_seed(5)
    group = dist.group.WORLD
    assert group is not None

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    padding = torch.tensor([[False, False, True], [False, False, False]])
    per_head = random(2 * 4, 5, 3)
    calls: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
        "padding": ({"batch_first": True}, (2,), {"key_padding_mask": padding}),
        "no weights": ({"batch_first": True}, (2,), {"need_weights": False, "attn_mask": per_head > 1}),
        "weights of each head": ({"batch_first": True}, (2,), {"average_attn_weights": False, "attn_mask": per_head}),
        "tokens first": ({}, (2,), {"attn_mask": random(5, 3), "is_causal": True}),
        "one sample": ({"bias": False}, (), {"attn_mask": random(5, 3)}),
        "other widths": ({"kdim": 6, "vdim": 7, "batch_first": True}, (2,), {"key_padding_mask": padding}),
    }
    found: dict[str, float] = {}
    for name, (settings, batch, options) in calls.items():
        torch.manual_seed(0)
        whole = nn.MultiheadAttention(16, 4, dtype=torch.float64, **settings)
        torch.manual_seed(0)
        sliced = nn.MultiheadAttention(16, 4, dtype=torch.float64, **settings)
        cut(sliced, world.rank)
        multihead(
            sliced,
            dict.fromkeys(("query", "key", "value"), _copied),
            UnitRegion(_summed, ForwardContext(), Portion()),
            group,
        )
        first = settings.get("batch_first", False) or not batch
        shapes = [(*batch, t, w) if first else (t, *batch, w) for t, w in _sizes(settings)]
        inputs = [random(*shape).requires_grad_() for shape in shapes]
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        expected, got = whole(*inputs, **options), sliced(*copies, **options)
        for output in (expected, got):
            (output[0].square().sum() + (output[1].square().sum() if output[1] is not None else 0)).backward()
        pairs = [*zip(expected, got, strict=True), *((x.grad, y.grad) for x, y in zip(inputs, copies, strict=True))]
        assert (expected[1] is None) == (got[1] is None)
        found[name] = max((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None)
    return found


def _sizes(settings: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Tokens and features of query, key and value."""
    return [(5, 16), (3, settings.get("kdim", 16)), (3, settings.get("vdim", 16))]


def _copied(x: Tensor) -> Tensor:
    from samestep.parallel import collectives

    assert dist.group.WORLD is not None
    return collectives.copy_to_region(x, dist.group.WORLD)


def _summed(x: Tensor) -> Tensor:
    from samestep.parallel import collectives

    assert dist.group.WORLD is not None
    return collectives.reduce_from_region(x, dist.group.WORLD)


def cut(module: nn.MultiheadAttention, rank: int) -> None:
    """Heads 2 * rank and 2 * rank + 1 of an attention of four heads of four features, by hand."""
    with torch.no_grad():
        for name, parameter in list(module.named_parameters()):
            rows = 3 if name.startswith("in_proj") else 1
            if name == "out_proj.weight":
                module.out_proj.weight = nn.Parameter(parameter[:, 8 * rank : 8 * rank + 8].clone())
            elif "in_proj" in name or name.endswith("proj_weight"):
                part = parameter.unflatten(0, (rows, 16))[:, 8 * rank : 8 * rank + 8].flatten(0, 1)
                setattr(module, name, nn.Parameter(part.clone()))


def on_each_rank() -> dict[str, Any]:
    with join(device="cpu", threads=1) as world:
        return {
            "held": held(world),
            "tokens": tokens_in_blocks(world),
            "messages": messages(world),
            "own loop": own_loop(world),
            "dropout": [with_dropout(world, layout) for layout in ("tp2", "tp2 sequence=split recompute=full")],
            "attention": attention(world),
            "float32": losses(training(world, LLAMA, "tp2")),
            "bf16": losses(training(world, LLAMA, "tp2", precision="bf16")),
            "bf16, split": losses(training(world, LLAMA, "tp2 sequence=split", precision="bf16")),
        }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return local.start(on_each_rank, (), 2)


def test_a_rank_holds_its_part_and_the_whole_is_put_together_again(found: dict[str, Any]) -> None:
    held = found["held"]
    assert held["state"]
    assert held["of"] > 0.9 * held["of all"]
    # 21 features of the perceptrons and 57 rows of the vocabulary are uneven: rank 0 has half a row more.
    assert held["of"] / 2 <= held["sliced"] < 0.52 * held["of"]


def test_tokens_are_split_between_sliced_layers_alone(found: dict[str, Any]) -> None:
    assert found["tokens"] == {
        "model.layers.1.input_layernorm": 5,  # of nine
        "model.layers.1.mlp.act_fn": 9,
        "model.norm": 9,
    }


def test_two_messages_a_unit_and_no_logits_are_sent(found: dict[str, Any]) -> None:
    # Two units a block, forward and backward; the table in forward, the output layer in backward.
    assert found["messages"] == {"hidden": 2 * 2 * 2 + 2, "gathered": 0}


def test_a_loop_of_ones_own_gives_an_example(found: dict[str, Any]) -> None:
    assert (
        "session.prepare(model, optimizer, example=inputs) with the inputs of a few samples"
        in found["own loop"]["refused"]
    )
    assert found["own loop"]["classes"] == (2, 3)
    torch.manual_seed(0)
    model, task = Encoder(), Texts(Encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = []
    with samestep.session("single") as session:
        session.prepare(model, optimizer)
        for batch in session.batches(task.train_set(), batch=10, collate=task.collate, steps=STEPS):
            alone.append(session.step(batch, task.loss).loss.item())
    assert found["own loop"]["losses"] == pytest.approx(alone, rel=1e-5)


def test_dropout_leaves_what_ranks_hold_alike_alike(found: dict[str, Any]) -> None:
    whole, split_recomputed = found["dropout"]
    assert whole["apart"] == split_recomputed["apart"] == 0
    # What is computed again in backward has the masks of the forward; other masks would be another step. And a mask
    # depends on the seed, the step, the sample and the place, and on no slice of anything.
    assert split_recomputed["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_pytorch_attention_on_slices_is_itself(found: dict[str, Any]) -> None:
    assert len(found["attention"]) == 6
    assert all(apart < 1e-12 for apart in found["attention"].values()), found["attention"]


def test_bf16_slices_train(found: dict[str, Any]) -> None:
    for name in ("bf16", "bf16, split"):
        assert found[name] == pytest.approx(found["float32"], rel=2e-2)
        assert found[name] != found["float32"]
