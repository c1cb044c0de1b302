"""Split tokens in models whose layers can't be split as a whole: the same step, or a refusal that says why."""

from collections.abc import Mapping, Sequence

import pytest
from proving import Case, prove, same
from token_models import Tokens

import samestep
from samestep.verification.proof import Proof

pytestmark = pytest.mark.timeout(300)

WORKS = (
    ("stages", "tp2 sequence=split"),
    ("excited", "cp2"),
    ("tagger", "cp2"),
    ("conditioned", "cp2"),
    ("asking", "pp2"),
    ("summing", "tp2 sequence=split"),
    ("rolled", "tp2 sequence=split"),
    ("narrow", "tp2"),  # where a slice fails on one rank alone, all leave it whole
)
# Models that fast tests have under the other kind of layout, or whose kind of layer they have in another.
MORE = (
    ("tokens first", "cp2"),
    ("located", "tp2 sequence=split"),
    ("placed", "tp2 sequence=split"),
    ("looped", "tp2 sequence=split"),
    ("video", "tp2 sequence=split"),
    ("cached", "pp2"),
    ("batch norm", "cp2"),
    ("stages", "cp2"),
    ("rolled", "cp2"),
    ("choosing", "pp2"),
    ("conditioned", "tp2 sequence=split"),
    ("batch norm", "tp2 sequence=split"),
)


def proofs_of(which: Sequence[tuple[str, str]]) -> dict[str, Proof | str]:
    cases: dict[str, Case] = {}
    for name, layout in which:
        recipe = samestep.Recipe(
            task=Tokens(name=name), batch=7, clip=0.5, dropout=False, optimizer=samestep.AdamW(lr=1e-2)
        )
        cases[f"{name}: {layout}"] = (recipe, layout, {})
    return prove(cases, steps=2)


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    return proofs_of([*WORKS, ("recurrent", "cp2"), ("summing", "cp2")])


@pytest.mark.slow
def test_more_models_are_split_as_far_as_they_can_be() -> None:
    proofs = proofs_of(MORE)
    assert same(proofs, list(proofs)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), WORKS)
def test_a_model_is_split_as_far_as_it_can_be(name: str, layout: str, proofs: Mapping[str, Proof | str]) -> None:
    assert same(proofs, [f"{name}: {layout}"]) == {}


@pytest.mark.slow
def test_a_model_in_which_nothing_can_be_split_is_refused(proofs: Mapping[str, Proof | str]) -> None:
    said = proofs["recurrent: cp2"]
    assert said == (
        'layout "cp2": Tagger has neither layers that hand on hidden states nor modules that take each token by '
        "itself, so its tokens can't be split; use dp2 or fsdp2"
    )


@pytest.mark.slow
def test_what_layers_give_beside_tokens_keeps_its_gradient(proofs: Mapping[str, Proof | str]) -> None:
    assert same(proofs, ["summing: cp2"]) == {}  # of the layers the parts that take each token by itself


@pytest.mark.slow
def test_random_numbers_of_a_module_that_takes_each_token_by_itself_are_those_of_its_tokens() -> None:
    recipe = samestep.Recipe(task=Tokens(name="dropping"), batch=7, optimizer=samestep.AdamW(lr=1e-2))
    cases: dict[str, Case] = {layout: (recipe, layout, {}) for layout in ("tp2 sequence=split", "cp2")}
    proofs = prove(cases, steps=2, dropout=True)
    assert same(proofs, list(proofs)) == {}
