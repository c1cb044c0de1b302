"""The check of a task's contract: each way to break it is found before a rank starts, named, and located."""

import json
import re
from pathlib import Path
from typing import Any

import drawing_nets as drawing
import odd_nets as nets
import odd_tasks as odd
import pytest
import torch
from call_counts import CallCounts
from small_tasks import Points
from torch import nn

import samestep
from samestep.cli.main import main
from samestep.contract import check
from samestep.layout import Layout
from samestep.tasks import memory_budget

FILES = {str(module.__file__) for module in (drawing, nets, odd)}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_of(task: samestep.Task, **recipe: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=16, steps=2, **recipe)


def message_of(task: samestep.Task, **run: Any) -> str:
    """What `train` says of a task, which must be one sentence's line; nothing is started and nothing written."""
    with pytest.raises(samestep.UserError) as caught:
        samestep.train(recipe_of(task), **{"layout": "dp2", "threads": 1, **run})
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    assert not Path("runs").exists()
    return message


_DECIDED = r"values of the batch decide .* the model \({}\) asks for one.* of steps"

# A task, the part of the contract that it breaks, words that the message must have, and the line that it must name.
BROKEN: dict[str, tuple[samestep.Task, str, str, str | None]] = {
    "samples that change": (odd.NoisyData(), "data", "another sample the second time", "def __getitem__"),
    "a length too long": (odd.TooFew(), "", r"length 207 gives no sample 206 \(IndexError", None),
    "noise in collate": (odd.NoisyCollate(), "collate", "draws random numbers", "def collate"),
    "weights of NumPy": (odd.Odd(nets.Unseeded), "model", "NumPy's generator", "np.random.rand(16)"),
    "a forward that fails": (
        odd.Odd(nets.Failing),
        "forward",
        "RuntimeError: mat1 and mat2",
        "return hidden @ hidden",
    ),
    "a vector": (odd.Vector(), "", r"a tensor of shape \[12\] as its sum", "def loss"),
    "no gradient": (odd.Detached(), "loss", "needs no gradient", "def loss"),
    "not finite": (odd.NotFinite(), "loss", "is -inf|is nan", "def loss"),
    "a count of 0": (odd.NoCount(), "", "a count of 0; use how many terms", "def loss"),
    "no terms": (odd.NoTerms(), "loss", "the count of samples 0 to 11 is 0", "def loss"),
    "labels out of range": (odd.OutOfRange(), "loss", "Target 2 is out of bounds", "output[:, :2]"),
    "layers in a list": (odd.Odd(nets.PlainList), "parameters", r"more\[0\] \(in a plain list\)", "def __init__"),
    "a parameter in a dict": (odd.Odd(nets.PlainDict), "parameters", r"more\['middle'\]\[0\]", "def __init__"),
    "a parameter that is written": (
        odd.Odd(nets.Written),
        "parameters",
        "writes to last.weight",
        "weight.data.copy_",
    ),
    "a moving average": (odd.Odd(nets.Followed), "parameters", "writes to slow.weight", "mine.data.lerp_"),
    "a table with max_norm": (
        odd.Odd(nets.Renormed),
        "parameters",
        "writes to table.weight.*max_norm=None",
        "self.table(",
    ),
    "clamped gradients": (odd.Odd(nets.Clamped), "parameters", "a loss 8 times as large, the gradient of", "class C"),
    "a hook that clamps": (
        odd.Odd(nets.ClampedByHook),
        "parameters",
        "the gradient of first.weight is not",
        "class C",
    ),
    "batch norm of padding": (odd.Padded(), "sum of parts", "norm .BatchNorm1d. takes.*padding", "def collate"),
    "padding without a mask": (
        odd.UnmaskedPadding(),
        "sum of parts",
        "UnmaskedMean. couples the samples.* padding must be masked, or all samples padded to one length",
        "def forward",
    ),
    "padding of answers": (
        odd.UnmaskedAnswers(),
        "sum of parts",
        "the model .AnswerMean. couples the samples.* padding must be masked, or all samples padded to one length",
        "def forward",
    ),
    "a sparse table": (odd.Odd(nets.Sparse), "", r"table \(Embedding\) has sparse gradients.*sparse=False", None),
    "NumPy's draws": (odd.Odd(drawing.NumpyDraw), "draws", "NumPyDraw|NumPy's generator", "np.random.rand()"),
    "Python's draws": (odd.Odd(drawing.PythonDraw), "draws", "Python's generator", "random.random()"),
    "a layer seldom skipped": (odd.Odd(drawing.SeldomSkipping), "draws", "Python's generator", "random.random()"),
    "seldom no gradient": (odd.Odd(drawing.SeldomWithoutSlope), "draws", "NumPy's generator", "np.random"),
    "seldom another function": (odd.Odd(drawing.AnyActivation), "model", "NumPy's generator", "np.random"),
    "a batch seldom flipped": (odd.SeldomFlipped(), "collate", "draws random numbers", "def collate"),
    "draws in a kernel": (odd.Odd(drawing.KernelDraw), "draws", "PyTorch's generator", "F.rrelu"),
    "a permutation": (odd.Odd(drawing.Permuted), "draws", "PyTorch's generator", "torch.randperm"),
    "noise in the loss": (odd.NoisyLoss(), "draws", "the loss draws from PyTorch's", "output + torch.randn_like"),
    "state between calls": (odd.Odd(nets.Counting), "repeatable", "from call to call", "def forward"),
    "no scores": (odd.NoScores(), "", "scores gave .* pair of tensors", "def scores"),
    "scores of a tuple": (odd.Unscorable(), "", "gives a tuple, .* write scores", "class Unscorable"),
    "draws in evaluation": (odd.DrawsInEvaluation(), "evaluation", "in evaluation mode", "def forward"),
    "a contrastive loss": (odd.Contrastive(), "sum of parts", "couples the samples of a batch", "def loss"),
    "a mean without a count": (odd.MeanOfOne(), "sum of parts", "1 terms for 12 samples, and 1 \\+ 1", "def loss"),
    "a mean with a count": (odd.MeanWithCount(), "sum of parts", "the loss is a mean", "def loss"),
    "a norm over the batch": (odd.Odd(nets.Centred), "sum of parts", r"the model \(Centred\) couples", "def forward"),
    "a set that changes": (odd.Shuffled(), "data", "other samples in the second call", "def train_set"),
    "one model": (odd.SameModel(), "model", "the same Net in each call", "def model"),
    "weights of a generator": (odd.Odd(nets.OwnGenerator), "model", "another scale in the second call", None),
    "a plain tensor": (odd.Odd(nets.PlainTensor), "parameters", "depends on scale, which is not reg", "def __init__"),
    "a loss with weights": (odd.LearntLoss(), "parameters", "depends on head of the task", "def __init__"),
    "a learnt count": (odd.WeightedCount(), "", "a count that needs a gradient", "def loss"),
    "a clipped gradient": (odd.Odd(nets.ClippedParameter), "parameters", "last.weight is not 8 times as large", None),
    "a scaled gradient": (odd.Odd(nets.ScaledGradient), "parameters", "is not 8 times as large", None),
    "zeros over a norm": (
        odd.Odd(nets.CentredBehindZeros),
        "sum of parts",
        "last.weight differs most",
        "def forward",
    ),
    "ghost batch norm": (
        odd.Odd(nets.Ghost),
        "",
        "takes batch norm more than once in a forward",
        "in input.chunk(2)",
    ),
    "no batch norm": (odd.Odd(nets.CentredByNorm), "sum of parts", "norm .NotQuiteBatchNorm. couples", "def forward"),
    "a fixed point": (odd.Odd(nets.FixedPoint), "sum of parts", _DECIDED.format("FixedPoint"), "if (state - before)"),
    "rows and columns": (odd.Odd(nets.Balanced), "sum of parts", _DECIDED.format("Balanced"), "if torch.allclose"),
    "a finer integral": (odd.Odd(nets.Refined), "sum of parts", _DECIDED.format("Refined"), "moving = len("),
    "a collate by group": (odd.CentredByCollate(), "sum of parts", "collate gives other values", "def collate"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_contract_is_named_with_its_line(name: str) -> None:
    task, part, words, line = BROKEN[name]
    message = message_of(task)
    assert message.startswith(f"the task's contract, {part}: " if part else "")
    assert re.search(words, message), message
    if line is not None:
        ((file, number),) = re.findall(r"\((/[^():]+\.py):(\d+)\)", message)
        assert file in FILES
        assert line in Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1]


NETS = (
    nets.Net,
    drawing.DropPath,
    drawing.LayerDrop,
    drawing.Noisy,
    nets.NormedByBatch,
    nets.MaskedByHook,
    nets.NormedAndMore,
    nets.Untracked,
    nets.KeepsInputs,
    nets.AsksInVain,
    nets.PartlyFrozen,
)


@pytest.mark.parametrize(
    "task", [*map(odd.Odd, NETS), odd.GradientPenalty(), odd.LastCount(), odd.Unscored(), odd.GlancingCollate()]
)
def test_a_contract_that_is_kept_says_nothing(task: samestep.Task, capsys: pytest.CaptureFixture[str]) -> None:
    samestep.train(recipe_of(task), threads=1, log=())
    assert "contract" not in capsys.readouterr().err


def test_a_forward_that_ran_is_kept_where_its_loss_is_broken() -> None:
    found = check.examine(samestep.Job(recipe=recipe_of(odd.NoTerms())), Layout(), odd.NoTerms())
    assert [finding.kept for finding in found[:6]] == [True, True, True, True, False, None]


def test_the_check_can_be_left_out() -> None:
    task = odd.MeanWithCount()
    assert samestep.train(recipe_of(task), threads=1, log=(), check=False).steps == 2


def test_the_check_leaves_no_trace_in_the_training() -> None:
    with_check, without = (
        samestep.train(recipe_of(Points(dropout=0.3)), threads=1, log=(), check=check) for check in (True, False)
    )
    assert with_check.losses == without.losses


class Attention(nn.Module):
    """Dropout of attention by a plain attribute of a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.rate if self.training else 0.0
        return x + nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=rate)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Sequential(Attention(), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.first(points).view(len(points), 1, 2, 8)  # [samples, heads, tokens, head_dim]
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden.mean((1, 2)))


def test_a_draw_in_a_compiled_block_is_refused_wherever_its_probability_comes_from() -> None:
    message = message_of(odd.Odd(Attentive), compile=True)
    assert "run.compile is true, and blocks.0.0 (Attention) draws by dropout" in message


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.slow
def test_a_draw_in_a_compiled_block_is_seen_without_the_check_too() -> None:
    with pytest.raises(samestep.UserError, match="the first step drew from PyTorch's generator"):
        samestep.train(recipe_of(odd.Odd(Attentive)), threads=1, compile=True, check=False, log=())


def test_a_model_too_large_for_one_process_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Large(nets.Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10_000, 16)  # 640 kB

    monkeypatch.setattr(memory_budget, "available_memory", lambda: 2**20)
    found = check.examine(samestep.Job(recipe=recipe_of(odd.Odd(Large))), Layout(), odd.Odd(Large))
    assert [finding.kept for finding in found if finding.part == "model"] == [None]
    check.check_contract(samestep.Job(recipe=recipe_of(odd.Odd(Large))), Layout(), odd.Odd(Large))
    assert "was not checked: the model takes more than" in capsys.readouterr().err


def test_verify_checks_too() -> None:
    with pytest.raises(samestep.UserError, match="couples the samples"):
        samestep.verify(recipe_of(odd.Contrastive()), layout="dp2", threads=1)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (odd.Shuffled(), r"train_set\(\)\[\d+\] is another one on rank 1 than on rank 0"),
        (odd.Odd(nets.OwnGenerator), r"model\(\): scale is another one on rank 1 than on rank 0"),
    ],
)
def test_ranks_that_build_other_tasks_are_seen_without_the_check_too(task: samestep.Task, words: str) -> None:
    with pytest.raises(samestep.UserError, match=words):
        samestep.train(recipe_of(task), layout="dp2", threads=1, log=(), check=False)


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("jobs") / "job.yaml"
    job = {"task": f"{odd.__file__}:Odd", "batch": 16, "steps": 4}
    file.write_text(json.dumps({"recipe": job}), encoding="utf-8")
    return file


def test_the_command_says_what_is_kept_and_which_layouts_there_are(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert main(["check", str(job_file), "--layouts", "dp2, fsdp2, cp2", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["kept"] is True
    assert {row["layout"]: row["verdict"] for row in found["layouts"]} == {
        "dp2": "same",
        "fsdp2": "same",
        "cp2": "refused",
    }
    assert found["layouts"][2]["reason"] in printed
    assert all(part in printed for part in check.PARTS)


def test_the_command_tries_no_layout_of_a_broken_contract(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(job_file.read_text(encoding="utf-8").replace(":Odd", ":Contrastive"), encoding="utf-8")
    assert main(["check", str(broken)]) == 1
    printed = capsys.readouterr().out
    assert "sum of parts: the loss couples the samples of a batch" in printed
    assert "no layout was tried" in printed


def test_no_check_is_an_option_of_train(job_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(job_file.read_text(encoding="utf-8").replace(":Odd", ":MeanWithCount"), encoding="utf-8")
    assert main(["train", str(broken), "--set", "run.log=[]"]) == 2
    assert main(["train", str(broken), "--set", "run.log=[]", "--no-check"]) == 0


class Rescaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.weight.div_(2)
        return super().forward(input)


class RescaledInEvaluation(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Rescaled(16, self.classes))


def test_a_pipeline_is_refused_a_model_that_writes_to_its_parameters_in_evaluation() -> None:
    message = message_of(RescaledInEvaluation(), layout="pp2")
    assert 'layout "pp2": the forward of Sequential writes to 1.weight in evaluation mode' in message
    place = re.search(r"test_contract.py:(\d+)", message)
    assert place is not None
    assert "self.weight.div_(2)" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(place[1]) - 1]
    assert "use dp2 or fsdp2" in message


class Padded(samestep.Task):
    """Translates sequences of unlike lengths: inputs and targets are padded separately."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pairs = [
            tuple(torch.randint(1, 7, (length,), generator=generator) for length in lengths)
            for lengths in (
                (3, 8),
                (9, 4),
                (9, 8),
                (4, 5),
                (6, 8),
                (9, 7),
                (5, 3),
                (8, 8),
                (2, 7),
                (9, 2),
                (7, 6),
                (3, 4),
            )
        ]

    def model(self) -> nn.Module:
        return nets.Translator()

    def train_set(self) -> samestep.Samples:
        return self.pairs

    def collate(self, samples: Any) -> samestep.Batch:
        source, target = (
            nn.utils.rnn.pad_sequence(list(side), batch_first=True) for side in zip(*samples, strict=True)
        )
        return samestep.Batch((source, target), target)

    def loss(self, output: Any, batch: samestep.Batch) -> Any:
        counted = batch.targets != 0
        terms = nn.functional.cross_entropy(output.mT, batch.targets, reduction="none")
        return (terms * counted).sum(), counted.sum()


@pytest.mark.parametrize(
    ("task", "forwards"), [(Points(), 5), (Points(held_out=0), 4), (Padded(), 4), (odd.Odd(nets.NormedByBatch), 4)]
)
def test_the_check_takes_few_forwards(task: samestep.Task, forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four forwards and three backwards, and a forward of the held-out samples where there are any."""
    counts, build = CallCounts(monkeypatch), task.model
    monkeypatch.setattr(task, "model", lambda: counts.of(build()))
    check.check_contract(samestep.Job(recipe=recipe_of(task)), Layout(), task)
    assert counts == {"forward": forwards, "backward": 3}


class OverTokens(samestep.Task):
    """Sentences of unlike lengths for a net with batch norm over tokens, padded to `length` or to the longest."""

    def __init__(self, *, glances: bool, length: int = 0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = [
            torch.randint(1, 7, (size,), generator=generator) for size in (3, 9, 4, 8, 5, 7, 6, 9, 3, 4, 8, 2)
        ]
        self.glances, self.length = glances, length

    def model(self) -> nn.Module:
        return nets.NormedOverTokens(glances=self.glances)

    def train_set(self) -> samestep.Samples:
        return self.rows

    def collate(self, samples: Any) -> samestep.Batch:
        longest = self.length or max(map(len, samples))
        tokens = torch.stack([nn.functional.pad(row, (0, longest - len(row))) for row in samples])
        return samestep.Batch(tokens, torch.tensor([len(row) % 3 for row in samples]))

    def loss(self, output: Any, batch: samestep.Batch) -> Any:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)


@pytest.mark.parametrize("glances", [False, True])
def test_batch_norm_over_padding_is_refused_and_works_with_rows_of_one_length(*, glances: bool) -> None:
    words = (
        r"^the task's contract, sum of parts: norm \(BatchNorm1d\) takes its statistics over 108 numbers a feature"
    )
    assert re.search(words, message_of(OverTokens(glances=glances)))
    task = OverTokens(glances=glances, length=9)
    check.check_contract(samestep.Job(recipe=recipe_of(task)), Layout(), task)
