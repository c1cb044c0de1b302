"""What a rank holds and sends: counted and measured, held against formulas."""

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.cli.main import main
from samestep.comm.traffic import Traffic
from samestep.handwritten.loop import Loop
from samestep.training.usage import Allocations, Usage

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LAYERS = 64, 4
PARAMETERS = LAYERS * WIDTH * WIDTH


def benchmark() -> Any:
    """benchmarks/memory.py, which writes the tables of docs/memory.md."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks" / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Layers(Points):
    """Square layers that two ranks share evenly."""

    def model(self) -> nn.Module:
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS))
        return nn.Sequential(*layers)

    def train_set(self) -> samestep.Samples:
        vectors = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
        return [(vector, vector) for vector in vectors]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return (output.float() - batch.targets).square().sum(), len(output)


def usage(layout: str, *, precision: Any = "fp32", task: samestep.Task | None = None, **run: Any) -> Sequence[Usage]:
    recipe = samestep.Recipe(task=task or Layers(), batch=16, precision=precision)
    return samestep.dry_run(recipe, layout, threads=1, **run)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param("dpN", "fp32", marks=pytest.mark.slow),
        ("zero1xN", "fp32"),
        pytest.param("zero2xN", "fp32", marks=pytest.mark.slow),
        pytest.param("fsdpN", "fp32", marks=pytest.mark.slow),
        ("fsdpN", "bf16"),
    ],
)
def test_bytes_of_two_ranks_follow_the_formulas(name: str, precision: str) -> None:
    formulas = benchmark()
    ranks = usage(formulas.LAYOUTS[name](2), precision=precision)
    assert len(ranks) == 2
    for rank in ranks:
        kept = rank.parameters + rank.gradients + rank.optimizer_state
        assert kept == pytest.approx(PARAMETERS * formulas.KEPT[name].value(2), rel=0.03)
        assert rank.sent_in_all == pytest.approx(PARAMETERS * formulas.SENT[name, precision].value(2), rel=0.03)
        # Whole layers, all that are kept or the one that computes, with the messages of two.
        at_once = {"zero2xN": LAYERS + 2, "fsdpN": 1 + 2}.get(name, 0)
        assert rank.gathered == at_once * WIDTH * WIDTH * {"fp32": 4, "bf16": 2}[precision]


def test_one_rank_holds_four_tensors_a_parameter_and_sends_nothing() -> None:
    (rank,) = usage("single")
    assert rank.parameters == rank.gradients == 4 * PARAMETERS
    assert rank.optimizer_state == pytest.approx(8 * PARAMETERS, rel=0.001)
    assert (rank.host, rank.disk, rank.gathered, rank.sent_in_all) == (0, 0, 0, 0)


def test_activations_are_what_backward_needs() -> None:
    # 16 samples; each layer keeps its output alone, its input being the layer's before: tanh keeps what it gives, and
    # what it took dies with the forward. The loss keeps the difference d from the targets. The peak is the gradient
    # of its square, with a copy of d, twice it, and that times the loss's own gradient. Scalars are a few bytes more.
    (rank,) = usage("single")
    layer = 4 * 16 * WIDTH
    assert rank.activations == pytest.approx((LAYERS + 1 + 3) * layer, abs=64)


def test_half_the_samples_have_half_the_activations() -> None:
    whole, half = (usage("single", micro_batch=size, task=Wide())[0].activations for size in (16, 8))
    assert half == pytest.approx(whole / 2, rel=0.1)


def test_recomputation_holds_less() -> None:
    plain, full = (usage(layout, task=Deep())[0].activations for layout in ("single", "single recompute=full"))
    assert full < 0.6 * plain


class Wide(Layers):
    """Activations far larger than weights: 16 values a weight."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten())


class Deep(Layers):
    """Blocks that keep several times their input."""

    def model(self) -> nn.Module:
        def block() -> nn.Module:
            inner = 4 * WIDTH
            return nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.LayerNorm(inner), nn.Linear(inner, WIDTH))

        return nn.Sequential(*(block() for _ in range(6)))


def test_a_training_reports_what_ranks_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("recipe: {task: regression, steps: 4, batch: 8, args: {samples: 32, held_out: 0}}\n")
    assert main(["train", str(job), "--folder", str(tmp_path / "run"), "--details"]) == 0
    shown = capsys.readouterr().out
    for words in ("bytes of a rank in one step", "optimizer state", "peak activations"):
        assert words in shown
    (rank,) = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["usage_bytes"]
    # 20 weights and a bias in float32; AdamW's averages, and two counts of steps.
    assert (rank["parameters"], rank["gradients"], rank["optimizer_state"]) == (84, 84, 176)
    assert rank["sent"] == {}


def test_a_dry_run_prints_and_writes_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text("recipe: {task: regression, epochs: 50}\n")
    assert main(["train", str(job), "--dry-run", "--json", "out.json"]) == 0
    assert "peak activations" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "out.json"}
    (rank,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["usage_bytes"]
    assert rank["parameters"] == 84


def test_json_without_a_dry_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("recipe: {task: regression}\n")
    assert main(["train", str(job), "--json", "out.json"]) == 2
    assert "--json goes with --dry-run" in capsys.readouterr().err


def test_the_step_that_is_measured_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    recipe = samestep.Recipe(task=Points(), batch=33, steps=6, precision="fp64", clip=0.5)
    result = samestep.train(recipe, folder=tmp_path, threads=1, log=())
    assert result.usage  # one of the steps was measured
    loop = Loop(recipe, Points(), device=torch.device("cpu"))
    assert result.losses == pytest.approx([step.loss.item() for step in loop.steps()], rel=1e-12)


def all_collectives(rank: int) -> None:
    """Each collective once, with messages of 12 or 2 x 12 float32."""
    mine, both = torch.zeros(12), torch.zeros(24)
    dist.all_reduce(mine)
    dist.all_gather_into_tensor(both, mine)
    dist.all_gather([torch.zeros(12), torch.zeros(12)], mine)
    dist.reduce_scatter_tensor(mine, both)
    dist.broadcast(mine, src=0)
    dist.all_to_all_single(torch.zeros(24), both)
    dist.reduce(mine, dst=0)
    dist.barrier()
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(mine, 0)


def count_collectives() -> tuple[dict[str, float], dict[str, float]]:
    with Traffic() as traffic:
        all_collectives(dist.get_rank())
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, traffic.sent)
    return everyone[0], everyone[1]


def in_ranks(function: Callable[[], Any], processes: int) -> Any:
    from samestep.launch import local

    return local.start(_joined, (function,), processes)


def _joined(function: Callable[[], Any]) -> Any:
    from samestep.launch.world import join

    with join(device="cpu", threads=1):
        return function()


def test_every_collective_is_counted_by_its_formula() -> None:
    first, second = in_ranks(count_collectives, 2)
    message = 48.0  # bytes; of two ranks each sends half of what is shared
    expected = {
        "all-reduce": message,
        "all-gather": 2 * message,
        "reduce-scatter": message,
        "broadcast": message / 2,
        "all-to-all": message,
        "reduce": message / 2,
        "gather": 0.0,
        "scatter": 0.0,
    }
    assert first == {**expected, "point-to-point": message}
    assert second == {**expected, "point-to-point": 0.0}


def test_allocations_follow_storages_and_forget_the_freed() -> None:
    kept = torch.ones(100)
    allocations = Allocations()
    with allocations.follow():
        first = torch.zeros(1000)  # 4,000 bytes
        view = first[10:]
        del first
        second = view + 1  # 3,960
        del view
        third = kept.add_(1)[5:]  # a view of what was there
        fourth = torch.zeros(500)
    assert allocations.peak(without=[]) == 4000 + 3960
    assert allocations.peak(without=[second]) == 4000
    assert allocations.peak_gathered() == 0
    assert len(third) + len(fourth) == 595


def test_the_docs_show_the_same_tables_in_both_languages() -> None:
    texts = [(ROOT / "docs" / page).read_text("utf-8") for page in ("memory.md", "zh/memory.md")]
    places = [re.findall(r"<!-- table \d -->\n(.*?)<!-- end -->", text, re.DOTALL) for text in texts]
    assert [len(tables) for tables in places] == [4, 4]
    for english, chinese in zip(*places, strict=True):
        assert english.splitlines()[2:] == chinese.splitlines()[2:]


def rows(number: int) -> list[list[str]]:
    """The cells of a table of docs/memory.md, without its titles."""
    text = (ROOT / "docs" / "memory.md").read_text("utf-8")
    found = re.search(rf"<!-- table {number} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found is not None
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in found[1].strip().splitlines()[2:]]


def test_the_docs_tables_have_what_one_rank_holds_today() -> None:
    measured = benchmark().measure(1)
    for name, _, alone, *_ in rows(1):
        assert float(alone) == pytest.approx(measured[name, "fp32"]["kept"], abs=0.05)


def test_the_docs_tables_are_the_formulas_within_three_percent() -> None:
    """As are the bytes of two ranks, which are measured above."""
    formulas = benchmark()
    for name, text, *measured in rows(1):
        assert text == formulas.KEPT[name].text
        for n, figure in zip((1, 2, 4, 8), measured, strict=True):
            assert float(figure) == pytest.approx(formulas.KEPT[name].value(n), rel=0.03)
    for name, precision, text, *measured in rows(2):
        assert text == formulas.GATHERED[name, precision].text
        for n, figure in zip((2, 4, 8), measured, strict=True):
            assert float(figure) == pytest.approx(formulas.GATHERED[name, precision].value(n), abs=0.0051)
    for name, held, text, paper in rows(3):
        formula = formulas.PAPER[name]
        assert text == formula.text
        assert float(held) == pytest.approx(formula.value(8), rel=0.03)
        assert float(paper) == pytest.approx(formula.value(8), abs=0.005)
    for name, precision, text, *measured, times in rows(4):
        formula = formulas.SENT[name, precision]
        assert text == formula.text
        for n, figure in zip((2, 4, 8), measured, strict=True):
            assert float(figure) == pytest.approx(formula.value(n), rel=0.03)
        assert float(times) == formula.value(2) / formulas.SENT["dpN", "fp32"].value(2)
