"""run.compile: compiled blocks take the same step, under whichever layout, and what can't be compiled is refused."""

import inspect
import os
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from proving import same
from small_tasks import Points
from tiny_models import Tiny
from torch import nn

import samestep
from samestep import environment
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.compile import compile_blocks
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.recompute import recompute
from samestep.tasks.registry import resolve
from samestep.verification.proof import Reference, hold_against, proof_job, reference

LAYERS, PRODUCTS = 4, 7  # of the tiny Llama: layers, and products of matrices in each
BATCH, MICRO_BATCH = 10, 5

# Is told how many products of matrices a graph has, and gives what is to be called when the graph runs.
Count = Callable[[int], Callable[[], None]]
TracedBy = Callable[[Count], Callable[..., Any]]  # makes a backend of the compiler's that counts


def recipe(model: str | Tiny, **values: object) -> samestep.Recipe:
    task = Tiny(name=model) if isinstance(model, str) else model
    settings = {"batch": BATCH, "steps": 3, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=task, **{**settings, **values})  # pyright: ignore[reportArgumentType]


class Normed(Tiny):
    """Blocks with batch norm, more than the compiler would compile one by one (its recompile_limit is 8)."""

    LAYERS = 10

    def __init__(self) -> None:
        super().__init__(name="mlp")

    def model(self) -> nn.Module:
        layers = (nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.ReLU()) for _ in range(self.LAYERS))
        return nn.Sequential(nn.Linear(20, 20), nn.Sequential(*layers), nn.Linear(20, 1))


class Written(Tiny):
    """Two like blocks without biases, and nothing held out: a kernel for the forward and one for the backward.

    Ranks keep what they compile in `folder`. They neither try out which vectors this processor has nor compile the
    headers of all kernels beforehand, which would take many times as long as these kernels.
    """

    def __init__(self, *, folder: Path) -> None:
        super().__init__(name="mlp")
        self.folder = folder

    def model(self) -> nn.Module:
        if environment.ranks() is not None:  # in a rank, whose process it is
            from torch._inductor import config

            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
            config.cpp.vec_isa_ok = False
            config.cpp_cache_precompile_headers = False
            config.compile_threads = 1
        blocks = (nn.Sequential(nn.Linear(20, 20, bias=False), nn.Tanh()) for _ in range(2))
        return nn.Sequential(nn.Linear(20, 20), nn.Sequential(*blocks), nn.Linear(20, 1))

    def eval_set(self) -> None:
        return None


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler (Debian: g++)")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_kernels_take_the_same_step(tmp_path: Path) -> None:
    proof = samestep.verify(recipe(Written(folder=tmp_path)), "fsdp2", steps=2, compile=True, threads=1, check=False)
    assert proof.same_step, proof
    assert list(tmp_path.rglob("*.so"))  # else nothing was compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "single",
        "dp2",
        "fsdp2 recompute=full",
        "fsdp2 recompute=selective",
        "tp2 sequence=split recompute=selective",
        "pp2",
        "pp2 stages=2 schedule=interleaved-1f1b recompute=full",
        "cp2",
        "cp2 attention=ring",
        "pp2 cp2 attention=ring",
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.timeout(600)
def test_compiled_blocks_take_the_same_step(layout: str) -> None:
    proof = samestep.verify(recipe("bert"), layout=layout, steps=3, compile=True, threads=1)
    assert proof.same_step, proof


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A model with compiled blocks: its layers, and products of matrices in each."""

    model: str | Tiny = "llama"
    layers: int = LAYERS
    products: int = PRODUCTS
    micro_batch: int | None = MICRO_BATCH
    bucket_mb: float | None = None


LLAMA = Compiled()
# Statistics over the ranks are a part of the block; a compiled one is computed again as a whole.
NORMED = Compiled(model=Normed(), layers=Normed.LAYERS, products=1, micro_batch=None)
# The compiler breaks no graph at the end of a bucket, and refuses none smaller than PyTorch's first one.
IN_BUCKETS = replace(NORMED, bucket_mb=0.25)
# gpt-oss has attention with sinks, which gets all tokens; what differs from call to call is no part of it.
GATHERED = Compiled(model="gpt-oss", layers=2, products=5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(170)
def test_blocks_call_what_was_traced_of_one_of_them() -> None:
    """The compiler's front end alone, whose graphs run as they are: kernels take minutes to be written."""
    _assert_compiled([(LLAMA, "pp2 recompute=full"), (IN_BUCKETS, "dp2")], steps=1, traced_by=as_it_is)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_blocks_of_more_models_and_layouts_call_what_was_traced_of_one_of_them() -> None:
    cases = [(LLAMA, "tp2 sequence=split"), (LLAMA, "cp2"), (GATHERED, "cp2"), (NORMED, "fsdp2 recompute=selective")]
    _assert_compiled(cases, steps=1, traced_by=as_it_is)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layouts", [("pp2", "tp2 recompute=full"), ("cp2",), ("cp2 attention=ring",)])
def test_blocks_are_cut_into_forward_and_backward(layouts: Sequence[str]) -> None:
    """As for the compiler; what it would write is run as it is."""
    _assert_compiled([(LLAMA, layout) for layout in layouts], steps=2, traced_by=in_forward_and_backward)


def _assert_compiled(cases: Sequence[tuple[Compiled, str]], *, steps: int, traced_by: TracedBy) -> None:
    """The step is that of one process, and every block's products of matrices ran in what was traced of a few."""
    jobs: list[Job] = []
    known: dict[Compiled, Reference] = {}
    with TemporaryDirectory() as folder:
        for model, layout in cases:
            sizes = {"micro_batch": model.micro_batch, "bucket_mb": model.bucket_mb}
            run = Run(compile=True, threads=1, check=False, layout=layout, **sizes)  # pyright: ignore[reportArgumentType]
            jobs.append(proof_job(Job(recipe=recipe(model.model), run=run)))
            if model not in known:
                place = Path(folder) / str(len(known))
                place.mkdir()
                known[model] = reference(jobs[-1], resolve(jobs[-1].recipe), steps, place)
        found = local.start(_traced, (jobs, [known[model] for model, _ in cases], steps, traced_by), 2)
    names = [f"{number}: {layout}" for number, (_, layout) in enumerate(cases)]
    assert same({name: proof for name, (proof, *_) in zip(names, found, strict=True)}, names) == {}
    for (model, layout), (_, traced, ran) in zip(cases, found, strict=True):
        # A stage has half of the layers; ranks with half of the tokens or features have all of them.
        least = steps * (BATCH // (model.micro_batch or BATCH)) * model.layers * model.products
        assert ran >= least // Layout.parse(layout).pipeline, layout
        # One graph (or its pieces) for a shape, one for any shape, and one without gradients; not one a layer.
        assert traced <= 3 * model.products, layout


def as_it_is(count: Count) -> Callable[..., Any]:
    """A backend of the compiler's that runs what was traced as it is, and tells the products of matrices in it."""

    product: Any = torch._C._nn.linear  # pyright: ignore[reportAttributeAccessIssue]

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        ran = count(sum(node.target is product for node in graph.graph.nodes))

        def run(*arguments: Any) -> Any:
            ran()
            return graph(*arguments)

        return run

    return backend


def in_forward_and_backward(count: Count) -> Callable[..., Any]:
    """The same, cut into forward and backward of which PyTorch's operators are left."""
    from torch._dynamo.backends.common import aot_autograd

    targets = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

    def forward(graph: Any, _: Any) -> Callable[..., Any]:
        return boxed(graph, sum(node.target in targets for node in graph.graph.nodes))

    def backward(graph: Any, _: Any) -> Callable[..., Any]:
        return boxed(graph, 0)

    def boxed(graph: Any, products: int) -> Callable[..., Any]:
        ran = count(products)

        def run(arguments: list[Any]) -> Any:
            ran()
            given, arguments[:] = list(arguments), []
            return graph(*given)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


def _traced(
    jobs: Sequence[Job], known: Sequence[Reference], steps: int, traced_by: TracedBy
) -> list[tuple[Any, int, int]]:
    """Each job's proof, and how many products of matrices this rank's compiled forwards have, and computed."""

    found: list[tuple[Any, int, int]] = []
    with join(device="cpu", threads=1) as world:
        for job, reference in zip(jobs, known, strict=True):
            torch._dynamo.reset()  # nothing traced of the job before is called
            traced: list[int] = []
            ran: list[int] = []

            def count(products: int, traced: list[int] = traced, ran: list[int] = ran) -> Callable[[], None]:
                traced.append(products)
                return partial(ran.append, products)

            layout = Layout.parse(job.run.layout)
            mine = reference if world.rank == 0 else None
            with patch.object(torch, "compile", partial(torch.compile, backend=traced_by(count))):
                proof = hold_against(job, resolve(job.recipe), world, layout, steps, mine)
            found.append((proof, sum(traced), sum(ran)))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recomputing", [False, True])
def test_a_copy_of_a_compiled_block_has_weights_of_its_own(recomputing: bool) -> None:
    linear = nn.Linear(3, 3)
    block = nn.Sequential(linear, nn.ReLU())
    recompute([block], "full", ForwardContext())
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        compile_blocks([block], recomputing=recomputing)
    assert list(inspect.signature(block.forward).parameters) == ["input"]  # models ask which arguments there are
    copied = deepcopy(block)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    given = torch.ones(2, 3, requires_grad=True)
    assert torch.equal(block(given), linear(given).relu())
    assert not copied(given).any()


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("ep2", "experts are not compiled yet; use run.compile: false"),
        ("pp2 schedule=interleaved-zero-bubble", "gives both at once; use schedule=1f1b, or run.compile: false"),
    ],
)
def test_layouts_that_are_not_compiled_are_refused(layout: str, what: str) -> None:
    with pytest.raises(samestep.LayoutError, match=what):
        samestep.verify(recipe("bert"), layout=layout, compile=True, check=False)


def test_dropout_is_not_compiled() -> None:
    task = Points(dropout=0.1)
    with pytest.raises(samestep.UserError, match=r"compile is true, and 3 \(Dropout\) .* recipe\.dropout: false"):
        samestep.verify(samestep.Recipe(task=task, steps=2), compile=True, dropout=True)
