"""run.compile: compiled blocks take the same step, and what can't be compiled yet is refused."""

import pytest
from small_tasks import Points
from tiny_models import Tiny

import samestep


def recipe(name: str, **values: object) -> samestep.Recipe:
    settings = {"batch": 10, "steps": 3, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=Tiny(name=name), **{**settings, **values})  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "dp2", "fsdp2 recompute=full", "tp2"])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.timeout(600)
def test_compiled_blocks_take_the_same_step(layout: str) -> None:
    proof = samestep.verify(recipe("bert"), layout=layout, steps=3, compile=True, threads=1)
    assert proof.same_step, proof


@pytest.mark.parametrize(("layout", "what"), [("pp2", "stages are not"), ("cp2", "blocks on parts of the tokens")])
def test_layouts_that_are_not_compiled_are_refused(layout: str, what: str) -> None:
    with pytest.raises(samestep.LayoutError, match=f"{what}.* run.compile: false"):
        samestep.verify(recipe("bert"), layout=layout, compile=True, check=False)


def test_dropout_is_not_compiled() -> None:
    task = Points(dropout=0.1)
    with pytest.raises(samestep.UserError, match=r"compile is true, and 3 \(Dropout\) .* recipe\.dropout: false"):
        samestep.verify(samestep.Recipe(task=task, steps=2), compile=True, dropout=True)
