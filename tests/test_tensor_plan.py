"""What tensor parallel slices of each kind of model, spelled out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import own_layers as own
import pytest
import torch
from tiny_texts import VOCABULARY, Averaged, Decoder, Encoder, bert, gpt2, llama, tokens
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.parallel.blocks import find_blocks
from samestep.parallel.tensor.modules import Heads, is_linear
from samestep.parallel.tensor.plan import TensorPlan, even_ranges, make_plan, vocabulary_ranges
from samestep.parallel.tensor.regions import find_regions
from samestep.parallel.trace import trace

pytestmark = pytest.mark.quick

LLAMA_BLOCK = {
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}
BERT_BLOCK = {
    "attention.self.query": "column",
    "attention.self.key": "column",
    "attention.self.value": "column",
    "attention.output.dense": "row",
    "intermediate.dense": "column",
    "output.dense": "row",
}
GPT2_BLOCK = {"attn.c_attn": "column", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"}
ENCODER_BLOCK = {"self_attn": "column", "linear1": "column", "linear2": "row"}
DECODER_BLOCK = {**ENCODER_BLOCK, "multihead_attn": "column"}


def in_blocks(prefix: str, roles: dict[str, str], count: int = 2) -> dict[str, str]:
    return {f"{prefix}.{number}.{name}": role for number in range(count) for name, role in roles.items()}


def phi3() -> nn.Module:
    from transformers import Phi3ForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 21}
    return Phi3ForCausalLM(tokens("Phi3Config", num_key_value_heads=2, pad_token_id=0, **sizes))


def qwen3() -> nn.Module:
    from transformers import Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 21}
    return Qwen3ForCausalLM(tokens("Qwen3Config", num_key_value_heads=2, head_dim=6, **sizes))


def t5() -> nn.Module:
    from transformers import T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 6, "d_ff": 21, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(tokens("T5Config", decoder_start_token_id=0, **sizes))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5), nn.Softmax(-1), nn.Linear(5, 3))


TEXTS = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
TABLES = {"model.embed_tokens": "vocabulary", "lm_head": "vocabulary"}
T5_ATTENTION = {"q": "column", "k": "column", "v": "column", "o": "row"}
T5_BIAS = {
    f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias": "column" for side in ("encoder", "decoder")
}
T5_ENCODER = {
    **{f"layer.0.SelfAttention.{name}": role for name, role in T5_ATTENTION.items()},
    "layer.1.DenseReluDense.wi": "column",
    "layer.1.DenseReluDense.wo": "row",
}
T5_DECODER = {
    **{f"layer.0.SelfAttention.{name}": role for name, role in T5_ATTENTION.items()},
    **{f"layer.1.EncDecAttention.{name}": role for name, role in T5_ATTENTION.items()},
    "layer.2.DenseReluDense.wi": "column",
    "layer.2.DenseReluDense.wo": "row",
}

EXPECTED: list[tuple[Callable[[], nn.Module], Any, dict[str, str]]] = [
    (
        bert,
        TEXTS,
        {"bert.embeddings.word_embeddings": "vocabulary", **in_blocks("bert.encoder.layer", BERT_BLOCK)},
    ),
    (
        gpt2,
        TEXTS,
        {"transformer.wte": "vocabulary", "lm_head": "vocabulary", **in_blocks("transformer.h", GPT2_BLOCK)},
    ),
    (llama, TEXTS, {**TABLES, **in_blocks("model.layers", LLAMA_BLOCK)}),
    (partial(llama, tie_word_embeddings=True), TEXTS, {**TABLES, **in_blocks("model.layers", LLAMA_BLOCK)}),
    (qwen3, TEXTS, {**TABLES, **in_blocks("model.layers", LLAMA_BLOCK)}),
    (
        phi3,
        TEXTS,
        {
            **TABLES,
            **in_blocks("model.layers", {"self_attn.qkv_proj": "column", "self_attn.o_proj": "row"}),
            **in_blocks("model.layers", {"mlp.gate_up_proj": "column", "mlp.down_proj": "row"}),
        },
    ),
    (
        t5,
        {**TEXTS, "decoder_input_ids": TEXTS["input_ids"]},
        {
            **dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"), "vocabulary"),
            **in_blocks("encoder.block", T5_ENCODER),
            **in_blocks("decoder.block", T5_DECODER),
            **T5_BIAS,
        },
    ),
    (Encoder, TEXTS, {"embedding": "vocabulary", **in_blocks("encoder.layers", ENCODER_BLOCK)}),
    (
        Decoder,
        TEXTS,
        {"embedding": "vocabulary", "head": "vocabulary", **in_blocks("decoder.layers", DECODER_BLOCK)},
    ),
    (Averaged, TEXTS, {"embedding": "vocabulary", "attention": "column"}),
    (perceptron, torch.zeros(2, 9), {"0": "column", "2": "row"}),
]


def planned(model: nn.Module, example: Any, parts: int = 2, **given: Any) -> TensorPlan:
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [names[id(block)] for block in find_blocks(model) if "." in names[id(block)]]
    return make_plan(model, trace(model, example), blocks, parts, **given)


@pytest.mark.parametrize(("make", "example", "roles"), EXPECTED)
def test_what_is_sliced(make: Callable[[], nn.Module], example: Any, roles: dict[str, str]) -> None:
    assert planned(make(), example).roles() == roles


@pytest.mark.parametrize("layer", [own.Product, partial(own.Product, bias=False), own.Handing])
@pytest.mark.parametrize("activation", [own.Swish, own.Squared, own.Gate])
def test_layers_and_activations_of_ones_own_are_sliced(
    layer: Callable[..., nn.Module], activation: Callable[[], nn.Module]
) -> None:
    width = 10 if activation is own.Gate else 5
    model = nn.Sequential(layer(9, width), activation(), nn.Dropout(0.1), layer(5, 3))
    plan = planned(model, torch.zeros(2, 9))
    assert plan.roles() == {"0": "column", "3": "row"}
    assert plan.units[0].pieces == (((5, 5),) if activation is own.Gate else ((5,),))
    assert planned(nn.Sequential(layer(9, 6), nn.LayerNorm(6)), torch.zeros(2, 9)).gathered == ("0",)


@pytest.mark.parametrize(
    "layers",
    [
        (own.Doubled(9, 5), nn.Tanh(), nn.Linear(5, 3)),
        (own.Shifted(9, 5), nn.Tanh(), nn.Linear(5, 3)),
        (own.Unbiased(9, 5), nn.Tanh(), nn.Linear(5, 3)),
        (nn.Linear(9, 5), own.Centred(), nn.Linear(5, 3)),
    ],
    ids=lambda layers: ", ".join(type(layer).__name__ for layer in layers),
)
def test_what_only_looks_like_a_layer_or_an_activation_is_no_pair(layers: Sequence[nn.Module]) -> None:
    plan = planned(nn.Sequential(*layers), torch.zeros(2, 9))
    assert plan.roles() == {}
    assert "0" not in plan.gathered or type(layers[0]) is nn.Linear


def test_a_layer_that_is_tried_is_left_as_it_was() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input)

    layer = Counting(4, 4)
    assert is_linear(layer)
    assert layer.calls == 0
    assert "calls" not in vars(layer)


def test_split_tokens_between_gathers_are_refused_for_that() -> None:
    with pytest.raises(LayoutError, match=r"0 and others of Sequential are sliced one by one, .* use tp2$"):
        planned(nn.Sequential(own.Product(9, 6), nn.LayerNorm(6)), torch.zeros(2, 3, 9), tokens_split=True)


def test_fused_columns_are_cut_piece_by_piece_and_by_whole_heads() -> None:
    cuts = planned(phi3(), TEXTS).cuts(phi3())
    # 4 heads of queries, 2 of keys and 2 of values, 4 features each.
    assert cuts["model.layers.0.self_attn.qkv_proj.weight"] == (
        0,
        [[(0, 8), (16, 20), (24, 28)], [(8, 16), (20, 24), (28, 32)]],
    )
    assert cuts["model.layers.0.mlp.gate_up_proj.weight"] == (0, [[(0, 11), (21, 32)], [(11, 21), (32, 42)]])
    assert cuts["model.layers.0.mlp.down_proj.weight"] == (1, [[(0, 11)], [(11, 21)]])


def test_one_dimension_of_gpt2_weights_is_the_other_way_round() -> None:
    cuts = planned(gpt2(), TEXTS, parts=4).cuts(gpt2())
    assert cuts["transformer.h.0.attn.c_attn.weight"] == (
        1,
        [[(4 * rank + start, 4 * rank + start + 4) for start in (0, 16, 32)] for rank in range(4)],
    )
    assert cuts["transformer.h.0.attn.c_proj.weight"] == (0, [[(0, 4)], [(4, 8)], [(8, 12)], [(12, 16)]])
    assert "transformer.h.0.attn.c_proj.bias" not in cuts


def test_tables_of_t5_biases_are_cut_by_heads() -> None:
    cuts = planned(t5(), {**TEXTS, "decoder_input_ids": TEXTS["input_ids"]}).cuts(t5())
    assert cuts["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == (1, [[(0, 2)], [(2, 4)]])


def test_norms_of_heads_have_their_gradient_in_parts() -> None:
    model = qwen3()
    summed = find_regions(model, trace(model, TEXTS), planned(model, TEXTS), [], {}).summed
    assert summed == {
        f"model.layers.{number}.self_attn.{name}.weight" for number in range(2) for name in ("q_norm", "k_norm")
    }


def test_key_value_heads_that_ranks_share() -> None:
    assert [Heads(queries=8, keys=1).keys_of(rank, 2) for rank in range(2)] == [[0], [0]]
    assert [Heads(queries=8, keys=2).keys_of(rank, 4) for rank in range(4)] == [[0], [0], [1], [1]]
    # Two queries for each of three heads: the middle one's are on two ranks.
    assert [Heads(queries=6, keys=3).keys_of(rank, 2) for rank in range(2)] == [[0, 0, 1], [1, 2, 2]]


def test_ranges_cover_a_dimension_once() -> None:
    ranges = even_ranges([7, 7], 3)
    assert ranges == [[(0, 3), (7, 10)], [(3, 5), (10, 12)], [(5, 7), (12, 14)]]
    assert vocabulary_ranges(VOCABULARY, 4) == [[(0, 15)], [(15, 30)], [(30, 45)], [(45, 57)]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model.layers.0.self_attn.q_proj": "row"},
            'q_proj can\'t be "row": no column layer before it makes the 16 features',
        ),
        ({"model.layers.0.mlp.gate_proj": "vocabulary", "model.norm": "whole"}, 'called "model.norm"'),
        ({"lm_head": "diagonal"}, 'lm_head is "diagonal"; it can be column, row, vocabulary, whole'),
    ],
)
def test_a_wrong_plan_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        planned(llama(), TEXTS, roles=given)
    assert message in str(error.value)


def test_a_plan_of_ones_own_goes_before_what_is_found() -> None:
    roles = planned(llama(), TEXTS, roles={"*.0.mlp.down_proj": "whole", "lm_head": "whole"}).roles()
    found = {name: role for name, role in roles.items() if ".0.mlp." in name or name == "lm_head"}
    assert found == {}
    assert roles["model.layers.1.mlp.down_proj"] == "row"
    assert roles["model.embed_tokens"] == "vocabulary"


class Trying(nn.Module):
    """Tries an operator that fails, and does without."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError:
            return x


def test_a_trace_logs_no_traceback_of_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    assert trace(Trying(), torch.zeros(2, 3)).of("")
    assert not caplog.records
