"""What one layout saved another goes on from, in the middle of an epoch, as if nothing had been."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from resuming import job_of, largest_difference, train_all

import samestep
from samestep import Checkpointing, jobfile

# Llama with grouped-query heads and one table for embeddings and output, which layouts cut in different ways.
FILE = Path(__file__).parent.parent / "examples" / "proof" / "language.yaml"
SAVED_AT, STEPS = 3, 6

# Stages of slices: what they save is cut both ways. With three axes replicas add nothing to what is saved.
HYBRID = "pp2 tp2"
LAYOUTS = ("single", "dp2", "dp3", "zero1x2", "fsdp2", "tp2", "pp2", "pp2 dp2 tp2")
# Each of them under another way to hold parameters and optimizer state.
MORE = ("zero2x2", "cp2", "fsdp2 offload=parameters-disk", "zero1x2 offload=optimizer", "tp2 sequence=split")


def recipe() -> samestep.Recipe:
    given = jobfile.load(FILE).job.recipe
    values = {name: getattr(given, name) for name in given.__dataclass_fields__}
    # 13 samples a step: slices are uneven, and the third step lies within an epoch.
    return samestep.Recipe(
        **{
            **values,
            "precision": "fp64",
            "steps": STEPS,
            "epochs": None,
            "batch": 13,
            "model": {**given.model, "layers": 2},
        }
    )


def check(folder: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Save under the first layout of each pair, go on under the second, and hold the losses against one process's."""
    sources = tuple(dict.fromkeys(source for source, _ in pairs))
    saving = [job_of(recipe(), s, folder / "from" / s, checkpoint=Checkpointing(every=SAVED_AT)) for s in sources]
    saved = dict(zip(sources, train_all(saving), strict=True))
    alone = saved.get("single") or train_all([job_of(recipe(), "single", folder / "alone")])[0]
    resumed = train_all(
        [
            job_of(
                recipe(),
                target,
                folder / "to" / source / target,
                checkpoint=Checkpointing(resume=str(saved[source].folder / "checkpoints" / f"step-{SAVED_AT}")),
            )
            for source, target in pairs
        ]
    )
    differences = {}
    for (source, target), result in zip(pairs, resumed, strict=True):
        assert result.first_step == SAVED_AT
        assert result.steps == STEPS
        differences[source, target] = largest_difference(result.losses, alone.losses[SAVED_AT:])
        if source == target:
            assert result.losses == saved[source].losses[SAVED_AT:], f"{source}: not bit for bit"
    far = {pair: each for pair, each in differences.items() if not each < 1e-9}
    assert not far


@pytest.mark.slow
def test_layouts_go_on_from_what_others_saved(tmp_path: Path) -> None:
    check(tmp_path, [("single", HYBRID), (HYBRID, "fsdp2")])  # slow tests have the others


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_layout_goes_on_from_stages_of_slices_and_from_one_process(tmp_path: Path) -> None:
    cut = ("zero1x2", "fsdp2", "tp2", "pp2", HYBRID)  # replicas read what one process reads
    targets = (*LAYOUTS[:-1], HYBRID)
    check(tmp_path, [*(("single", target) for target in cut), *((HYBRID, target) for target in targets)])


@pytest.mark.slow
def test_every_layout_goes_on_from_three_axes_and_from_one_process(tmp_path: Path) -> None:
    check(tmp_path, [(source, target) for source in ("single", LAYOUTS[-1]) for target in LAYOUTS])


@pytest.mark.slow
def test_what_every_layout_saved_shards_go_on_from(tmp_path: Path) -> None:
    check(tmp_path, [(source, "fsdp2") for source in (*LAYOUTS[1:-1], MORE[0])])


@pytest.mark.slow
@pytest.mark.timeout(900)  # 196 pairs
def test_every_pair_of_layouts(tmp_path: Path) -> None:
    layouts = (*LAYOUTS, *MORE, HYBRID)
    check(tmp_path, [(source, target) for source in layouts for target in layouts])
