"""What one layout saved another goes on from, in the middle of an epoch, as if nothing had been."""

from pathlib import Path

import pytest
from resuming import job_of, largest_difference, train_all

import samestep
from samestep import Checkpointing, jobfile

# Llama with grouped-query heads and one table for embeddings and output, which layouts cut in different ways.
FILE = Path(__file__).parent.parent / "examples" / "proof" / "language.yaml"
SAVED_AT, STEPS = 3, 6

LAYOUTS = ("single", "dp2", "dp3", "zero1x2", "fsdp2", "tp2", "pp2", "pp2 dp2 tp2")
# Each of them under another way to hold parameters and optimizer state.
MORE = ("zero2x2", "cp2", "fsdp2 offload=parameters-disk", "zero1x2 offload=optimizer", "tp2 sequence=split")
FROM = ("single", "pp2 dp2 tp2")


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


def check(folder: Path, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    """Save under each source, go on under each target, and hold the losses against those of one process."""
    (alone,) = train_all([job_of(recipe(), "single", folder / "alone")])
    saving = [job_of(recipe(), s, folder / "from" / s, checkpoint=Checkpointing(every=SAVED_AT)) for s in sources]
    saved = dict(zip(sources, train_all(saving), strict=True))
    pairs = [(source, target) for source in sources for target in targets]
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


def test_every_layout_goes_on_from_what_another_saved(tmp_path: Path) -> None:
    check(tmp_path, FROM, LAYOUTS)


@pytest.mark.slow
def test_what_every_layout_saved_shards_go_on_from(tmp_path: Path) -> None:
    check(tmp_path, (*(each for each in LAYOUTS if each not in FROM), MORE[0]), ("fsdp2",))


@pytest.mark.slow
@pytest.mark.timeout(900)  # 169 pairs
def test_every_pair_of_layouts(tmp_path: Path) -> None:
    check(tmp_path, LAYOUTS + MORE, LAYOUTS + MORE)
