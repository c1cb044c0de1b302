"""run.compile: compiled blocks take the same step, and what can't be compiled yet is refused."""

import pytest
from small_tasks import Points
from tiny_models import Tiny

import samestep
from samestep.layout import Layout
from samestep.parallel.compile import check_compile


def recipe(name: str, **values: object) -> samestep.Recipe:
    settings = {"batch": 10, "steps": 3, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=Tiny(name=name), **{**settings, **values})  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "dp2", "fsdp2 recompute=full", "tp2", "pp2", "cp2"])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.timeout(600)
def test_compiled_blocks_take_the_same_step(layout: str) -> None:
    proof = samestep.verify(recipe("bert"), layout=layout, steps=3, compile=True, threads=1)
    assert proof.same_step, proof


def test_a_backward_in_two_is_not_compiled() -> None:
    with pytest.raises(samestep.LayoutError, match=r"zbv-zero-bubble computes .* apart.* or run\.compile: false"):
        samestep.verify(recipe("bert"), layout="pp2 schedule=zbv-zero-bubble", compile=True, check=False)


def test_blocks_with_experts_that_ranks_share_out_are_not_compiled() -> None:
    with pytest.raises(samestep.LayoutError, match=r"exchange tokens with experts .* run\.compile: false"):
        check_compile(Layout(expert=2))


def test_dropout_is_not_compiled() -> None:
    task = Points(dropout=0.1)
    with pytest.raises(samestep.UserError, match=r"compile is true, and 3 \(Dropout\) .* recipe\.dropout: false"):
        samestep.verify(samestep.Recipe(task=task, steps=2), compile=True, dropout=True)
