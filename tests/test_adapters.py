"""Low-rank adapters beside a frozen base: the same step under layouts, what is held and sent, and mistakes."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from adapter_tasks import OwnAdapters, PeftNextWord
from model_tasks import NextWord, Sentences
from proving import Case, assert_same_steps, prove, same
from small_tasks import Points
from torch import nn

import samestep
from samestep import Evaluation, LoRA
from samestep.parallel.low_rank import adapted_layers
from samestep.tasks.registry import resolve
from samestep.training.fit import build_model
from samestep.verification.proof import Proof

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")]

ALL = ("dp2", "zero1x2", "zero2x2", "fsdp2", "tp2", "tp2 sequence=split", "pp2", "cp2")
MORE = ("dp2 recompute=full", "fsdp2 offload=parameters", "tp2 recompute=full", "zero1x2 offload=optimizer")


def recipe(task: samestep.Task, adapter: LoRA | None = None, **values: Any) -> samestep.Recipe:
    values = {"batch": 7, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2), **values}
    return samestep.Recipe(task=task, adapter=adapter, **values)


def llama(**values: Any) -> samestep.Recipe:
    return recipe(NextWord(kind="llama", layers=2), LoRA(rank=3, dropout=0.2), **values)


def gpt2() -> samestep.Recipe:
    """Of layers whose weight is [inputs, outputs], with queries, keys and values in one."""
    return recipe(
        NextWord(kind="gpt2", layers=2),
        LoRA(rank=3, alpha=5, rank_stabilized=True, targets=("c_attn", "c_proj"), dropout=0.2),
    )


def bert() -> samestep.Recipe:
    """With an output layer that is trained whole."""
    return recipe(Sentences(kind="bert", layers=2), LoRA(rank=3, also_train=("classifier",)))


def cases(layouts: tuple[str, ...], *recipes: samestep.Recipe) -> list[Case]:
    return [(each, layout, {}) for each in recipes for layout in layouts]


def points() -> samestep.Recipe:
    """Of layers that are no pair, each of which tensor parallel computes in slices by itself."""
    return recipe(Points(samples=30), LoRA(rank=2, targets=("0", "4")))


# It must see whole matrices, which adapters cut over ranks are not.
MUON = samestep.NamedOptimizer(name="torch.optim.Muon", lr=1e-2)


def _assert_same(proofs: Mapping[str, Proof | str], names: Collection[str]) -> None:
    assert same(proofs, list(names)) == {}
    assert {getattr(proofs[name], "dtype", None) for name in names} == {"float64"}


OWN: Mapping[str, Case] = {
    "llama, shards": (llama(optimizer=MUON), "fsdp2", {}),
    "bert, stages": (bert(), "pp2", {}),
    "points, slices": (points(), "tp2", {}),
}


def test_a_llama_and_others_with_adapters_take_the_same_steps() -> None:
    _assert_same(prove(OWN, steps=2, dropout=True), OWN)


@pytest.mark.slow
def test_a_llama_with_adapters_and_muon_takes_the_same_steps() -> None:
    assert_same_steps(cases(("dp2", "tp2", "pp2"), llama(optimizer=MUON)), steps=2, dropout=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_with_adapters_take_the_same_steps() -> None:
    assert_same_steps(cases((*ALL, *MORE), llama(), gpt2(), bert()), steps=3, dropout=True)


@pytest.mark.slow
def test_a_llama_with_adapters_takes_the_same_steps_on_eight_ranks() -> None:
    assert_same_steps(cases(("pp2 fsdp2 tp2",), llama(), llama(optimizer=MUON), gpt2()), steps=2, dropout=True)


SOME_OF_PEFT = recipe(PeftNextWord(kind="llama", layers=2, targets=r".*(q_proj|o_proj|up_proj|down_proj)"))
OF_PEFT: Mapping[str, Case] = {"peft, tp2": (SOME_OF_PEFT, "tp2", {})}


@pytest.mark.slow
def test_models_of_peft_take_the_same_steps() -> None:
    pytest.importorskip("peft")
    _assert_same(prove(OF_PEFT, steps=2, dropout=True), OF_PEFT)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_of_peft_take_the_same_steps_under_all_layouts() -> None:
    pytest.importorskip("peft")
    every = recipe(PeftNextWord(kind="llama", layers=2)), recipe(PeftNextWord(kind="gpt2", layers=2))
    assert_same_steps(cases((*ALL, *MORE), *every), steps=3, dropout=True)


@pytest.mark.slow
def test_modules_beside_frozen_layers_take_the_same_steps() -> None:
    assert_same_steps(cases(ALL, recipe(OwnAdapters(kind="llama", layers=2))), steps=3, dropout=True)


def trained_bytes(wanted: samestep.Recipe) -> int:
    model = build_model(resolve(wanted), wanted).model
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def test_frozen_parameters_have_no_state_and_send_nothing() -> None:
    wanted = llama(evaluation=Evaluation(at_end=False), clip=None, steps=3)
    trained = trained_bytes(wanted)
    whole = trained_bytes(recipe(NextWord(kind="llama", layers=2)))
    ranks = samestep.dry_run(wanted, "dp2", threads=1)
    assert whole > 3 * trained
    for usage in ranks:
        assert usage.gradients == trained
        assert 2 * trained <= usage.optimizer_state < 2 * trained + 1000  # and each parameter's count of steps
        assert trained <= usage.sent_in_all < trained + 1000


def test_targets_are_all_layers_of_the_blocks_or_what_patterns_name() -> None:
    def layers(spec: LoRA, kind: str = "llama") -> set[str]:
        wanted = recipe(NextWord(kind=kind, layers=2), spec)
        return {name.rpartition(".")[2] for name in adapted_layers(build_model(resolve(wanted), wanted).model)}

    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers(LoRA()) == everything
    assert layers(LoRA(targets=("self_attn.*",))) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert layers(LoRA(targets=("q_proj", "lm_head"))) == {"q_proj", "lm_head"}
    assert layers(LoRA(), "gpt2") == {"c_attn", "c_proj", "c_fc"}


def test_at_first_adapters_change_nothing() -> None:
    plain = recipe(NextWord(kind="llama", layers=2))
    model, other = (build_model(resolve(each), each).model for each in (plain, llama()))
    state = other.state_dict()
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert {name for name, p in other.named_parameters() if p.requires_grad} == {
        name for name in state if ".lora_" in name
    }
    assert all(not value.any() for name, value in state.items() if "lora_B" in name)
    assert all(value.any() for name, value in state.items() if "lora_A" in name)


class Encoder(NextWord):
    """PyTorch's own layers, whose attention reads the weights of its output layer."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MISTAKES = {
    "no such layer": (
        LoRA(targets=("q_porj",)),
        'nothing in LlamaForCausalLM is called "q_porj"; use q_proj, k_proj',
    ),
    "no linear layer": (
        LoRA(targets=("embed_tokens",)),
        "model.embed_tokens is a Embedding, and adapters are for linear",
    ),
    "no such module": (LoRA(also_train=("clasifier",)), 'no module with parameters is called "clasifier"; use names'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_can_have_no_adapter_is_refused(name: str) -> None:
    spec, told = MISTAKES[name]
    with pytest.raises(samestep.UserError) as refused:
        samestep.train(recipe(NextWord(kind="llama", layers=2), spec, steps=1), "dp2", threads=1)
    assert told in str(refused.value)
    assert str(refused.value).startswith("recipe.adapter.")


def test_layers_that_nobody_calls_are_refused() -> None:
    wanted = recipe(Encoder(), LoRA(targets=("out_proj",)))
    with pytest.raises(samestep.UserError, match=r"layers\.0\.self_attn\.out_proj is read by the nn\.Multihead"):
        build_model(resolve(wanted), wanted)
    wanted = recipe(Encoder(), LoRA())
    assert {name.rpartition(".")[2] for name in adapted_layers(build_model(resolve(wanted), wanted).model)} == {
        "linear1",
        "linear2",
    }


def test_engines_without_adapters_refuse_them() -> None:
    with pytest.raises(samestep.UserError, match='engine "parameter-server" has no adapters; use engine native'):
        samestep.train(llama(steps=1), "ddp", processes=2, engine="parameter-server", threads=1)


def test_a_model_with_adapters_gets_no_others() -> None:
    pytest.importorskip("peft")
    wanted = recipe(PeftNextWord(kind="llama", layers=2), LoRA())
    with pytest.raises(samestep.UserError, match=r"the task's model has adapters already; use one of them"):
        build_model(resolve(wanted), wanted)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rank": 0}, "recipe.adapter.rank is 0; it should be greater than 0"),
        ({"rank": 1.5}, "recipe.adapter.rank is 1.5; it should be a whole number"),
        ({"alpha": 0}, "recipe.adapter.alpha is 0; it should be greater than 0"),
        ({"dropout": 1.0}, "recipe.adapter.dropout is 1.0; it should be less than 1"),
        ({"kind": "dora"}, "recipe.adapter.kind is 'dora'; it should be 'lora'"),
        ({"target": "q_proj"}, 'unknown key "recipe.adapter.target"; did you mean "targets"?'),
    ],
)
def test_wrong_values_are_told_with_their_key(values: dict[str, Any], told: str) -> None:
    from samestep.job import Job
    from samestep.validation import checked

    with pytest.raises(samestep.UserError) as refused:
        checked(Job, {"recipe": {"task": "causal-lm", "adapter": values}})
    assert told in str(refused.value)
