"""A step in float64 computes in float64 throughout, whatever a model casts to float32, and takes no false alarm."""

import _thread
import builtins
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from casting_tasks import DECODERS, Casting, Decoder
from proving import Case, prove
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import samestep
from samestep.parallel.exact.float64 import in_float64
from samestep.parallel.exact.grouped_product import grouped_product
from samestep.parallel.trace import trace
from samestep.verification.proof import Proof


def third() -> Tensor:
    """A number that float32 rounds."""
    return torch.full((2, 2), 1 / 3, dtype=torch.float64)


CASTS: list[Callable[[], Tensor]] = [
    lambda: third().float(),
    lambda: third().half(),
    lambda: third().bfloat16(),
    lambda: third().to(torch.float32),
    lambda: third().to(dtype=torch.float32),
    lambda: third().to("cpu", torch.float32),
    lambda: third().to(torch.ones((), dtype=torch.float32)),
    lambda: third().type_as(torch.ones((), dtype=torch.float32)),
    lambda: third().type(torch.float32),
    lambda: third().type("torch.FloatTensor"),
    lambda: third().type(torch.FloatTensor),  # pyright: ignore
    lambda: torch.tensor(1 / 3).expand(2, 2),
    lambda: torch.tensor([[1 / 3] * 2] * 2, dtype=torch.float32),
    lambda: torch.ones(2, 2) / 3,
    lambda: torch.ones(2, 2, dtype=torch.int64) / 3,
    lambda: torch.full((2, 2), 1 / 3, dtype=torch.float32),
    lambda: torch.zeros_like(third(), dtype=torch.float32) + third(),
    lambda: third().new_zeros(2, 2, dtype=torch.float32) + third(),
    lambda: third().sum(0, dtype=torch.float32).expand(2, 2) / 2,
    lambda: torch.zeros(2, 2).index_add_(0, torch.arange(2), third()),
    lambda: torch.arange(4, dtype=torch.float32).view(2, 2) * 0 + third(),
    lambda: nn.Linear(2, 2, bias=False, dtype=torch.float32).float().weight * 0 + third(),
    lambda: third() @ plain(torch.eye(2)),
    lambda: torch.einsum("ij,jk->ik", third(), plain(torch.eye(2))),
    lambda: F.linear(third(), plain(torch.eye(2))),
]


def plain(tensor: Tensor) -> Tensor:
    """In float32, made where no mode sees it: as what a model keeps in an attribute."""
    return torch.from_numpy(tensor.numpy().astype(np.float32))


@pytest.mark.parametrize("made", CASTS, ids=lambda made: "")
def test_what_is_cast_or_made_in_float32_is_float64(made: Callable[[], Tensor]) -> None:
    with in_float64():
        found = made()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, third(), rtol=1e-15, atol=0)


def test_other_types_stay_and_bits_are_read_as_they_are_asked_for() -> None:
    with in_float64():
        assert torch.arange(3).dtype == third().to(torch.int32).to(torch.int64).dtype == torch.int64
        assert third().type(torch.bool).dtype == torch.bool
        assert torch.ones(2, dtype=torch.int32).view(torch.float32).dtype == torch.float32
        assert third().to(torch.complex64).dtype == torch.ones(2, dtype=torch.complex64).dtype == torch.complex128
        assert torch.tensor(np.ones(2, dtype=np.float32)).dtype == torch.float64


def test_what_is_changed_in_place_stays_itself() -> None:
    kept = plain(torch.zeros(2, 2))
    with in_float64():
        kept.add_(third())
        kept[0] = third()[0]
        kept += third()
    torch.testing.assert_close(kept, torch.tensor([[2 / 3] * 2] * 2), rtol=1e-6, atol=0)


def test_a_cast_that_copies_still_does() -> None:
    """What is float32 in a training is copied by a cast to any other dtype, and by none to float32."""
    casts: list[tuple[bool, Callable[[Tensor], Tensor]]] = [
        (True, lambda x: x.half()),
        (True, lambda x: x.bfloat16()),
        (True, lambda x: x.double()),
        (True, lambda x: x.to(torch.bfloat16)),
        (True, lambda x: x.to("cpu", dtype=torch.float64)),
        (True, lambda x: x.type(torch.float16)),
        (False, lambda x: x.float()),
        (False, lambda x: x.to(torch.float32)),
        (False, lambda x: x.to("cpu")),
        (False, lambda x: x.type_as(x)),
    ]
    for copies, cast in casts:
        for x, mode in ((third().float(), False), (third(), True)):
            with in_float64(mode):
                assert (cast(x).data_ptr() != x.data_ptr()) == copies


def test_outside_of_it_all_is_as_it_was() -> None:
    with in_float64(False):
        assert third().float().dtype == torch.float32
    with pytest.raises(ZeroDivisionError), in_float64():
        raise ZeroDivisionError
    assert torch.get_default_dtype() == third().float().dtype == torch.ones(1).dtype == torch.float32


GROUPED = {"rows": ((9, 8), (3, 8, 4)), "columns": ((3, 4, 8), (8, 12)), "sums": ((4, 12), (12, 8))}


@pytest.mark.parametrize("shapes", GROUPED.values(), ids=GROUPED)
def test_a_grouped_product_is_that_of_pytorch(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    ends = torch.tensor([4, 4, 9 if a.shape[0] == 9 else 12], dtype=torch.int32)  # the second group is empty
    expected = F.grouped_mm(a, b, offs=ends)
    with in_float64():
        found = F.grouped_mm(a.double(), b.double(), offs=ends)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-5)
    with FakeTensorMode() as mode:
        imagined = grouped_product(mode.from_tensor(a), mode.from_tensor(b), mode.from_tensor(ends))
    assert imagined.shape == expected.shape


def experts(how: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of a mixture of experts, and the gradients of its parameters."""
    torch.manual_seed(0)
    model: Any = DECODERS["mixtral"](2, 0.0).to(dtype)
    model.set_experts_implementation(how)
    model.config.use_cache = False
    logits = model(input_ids=torch.arange(1, 13).view(2, 6)).logits
    logits.square().sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_grouped_experts_are_the_eager_ones() -> None:
    torch.testing.assert_close(experts("grouped_mm", torch.float32), experts("eager", torch.float32))
    with in_float64():
        grouped, eager = experts("grouped_mm", torch.float64), experts("eager", torch.float64)
    assert grouped[0].dtype == torch.float64
    torch.testing.assert_close(grouped, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mixture_of_experts_is_followed_without_values(dtype: torch.dtype) -> None:
    model: Any = DECODERS["mixtral"](2, 0.0).to(dtype)
    with in_float64(dtype == torch.float64):
        seen = trace(model, {"input_ids": torch.arange(1, 13).view(2, 6), "use_cache": False})
    (experts,) = seen.of("model.layers.1.mlp.experts")
    assert [output.shape for output in experts.outputs()] == [(12, 24)]
    assert "model.layers.1.mlp.experts.down_proj" in seen.behind(experts.outputs())
    # Two of four experts for each of 12 tokens: up and gate to 20 of 24 features, and back.
    assert experts.flops_after - experts.flops_before == 12 * 2 * 2 * (24 * 40 + 20 * 24)


def recipe(task: samestep.Task) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=10, epochs=2, clip=0.5, optimizer=samestep.AdamW(lr=1e-2))


def cases(casting: Sequence[str], decoders: Sequence[tuple[str, str]]) -> dict[str, Case]:
    """By layouts of a model with what is cast, and by kinds of decoders with their layouts."""
    task = recipe(Casting())
    kinds = {kind: recipe(Decoder(kind=kind)) for kind in dict.fromkeys(kind for kind, _ in decoders)}
    found: dict[str, Case] = {f"casting {layout}": (task, layout, {}) for layout in casting}
    for kind, layout in decoders:
        found[f"{kind} {layout}"] = kinds[kind], layout, {"micro_batch": 3} if layout == "dp2" else {}
    return found


def test_casts_that_are_computed_again_in_backward_take_the_same_step() -> None:
    assert_to_rounding(cases(["fsdp2 recompute=full"], []))


@pytest.mark.slow
def test_models_that_cast_to_float32_take_the_same_step() -> None:
    some = cases(
        ["pp2 recompute=full"],
        [("gemma", "dp2"), ("bloom", "fsdp2"), ("qwen2-moe", "tp2"), ("mixtral", "pp2")],
    )
    some["own checkpoint"] = recipe(Casting(reentrant=False)), "dp2", {}
    assert_to_rounding(some)


@pytest.mark.slow
def test_more_models_that_cast_to_float32_take_the_same_step() -> None:
    replicated = [(kind, "dp2") for kind in DECODERS if kind != "gemma"]
    assert_to_rounding(
        cases(["dp2", "zero1x2", "dp2 recompute=selective"], [*replicated, ("llama", "tp2"), ("gemma", "tp2")])
    )


def assert_to_rounding(cases: Mapping[str, Case]) -> None:
    proofs = prove(cases)
    apart = {
        name: proof if isinstance(proof, str) else dict(proof.max_relative_difference)
        for name, proof in proofs.items()
        if not isinstance(proof, Proof) or not max(proof.max_relative_difference.values()) < 1e-10
    }
    assert apart == {}


def test_a_casting_model_computes_what_it_would_without_casts() -> None:
    """Held against the same formulas written out in NumPy, in float64."""
    torch.manual_seed(0)
    block: Any = Casting().model().double().get_submodule("2")
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    with in_float64():
        found = block(x)
    weights = {name: value.detach().numpy() for name, value in block.named_parameters()}
    expected = by_numpy(x.numpy(), weights)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-13, atol=1e-13)
    assert np.abs(block(x).detach().numpy() - expected).max() > 1e-9  # so the casts do round without the mode


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_computes_again_is_float64_too(reentrant: bool) -> None:
    gradients = []
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = Casting(reentrant=how).model().double()
        with in_float64():
            model(third().expand(2, 2).repeat(3, 2)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


def by_numpy(x: Any, weights: dict[str, Any]) -> Any:
    normed = weights["scale"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    q, k, v = np.split(normed @ weights["qkv.weight"].T + weights["qkv.bias"], 3, -1)
    angles = np.arange(8.0)[:, None] / 100 ** (np.arange(4.0) / 4)

    def turn(y: Any) -> Any:
        a, b = y[..., :4], y[..., 4:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)

    scores = np.exp(turn(q) @ turn(k).swapaxes(-1, -2) / np.sqrt(8))
    mixed = scores / scores.sum(-1, keepdims=True) @ v
    sums = np.stack([mixed[:, 0::2].sum(1), mixed[:, 1::2].sum(1)], 1)
    return x + (mixed + sums.mean(1, keepdims=True)) @ weights["out.weight"].T + weights["out.bias"] + mixed**3


def test_what_is_imported_by_no_code_of_pythons_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the threads of autograd's in which an accelerator's backward runs: no function of Python's calls."""
    (tmp_path / "made_for_a_thread.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with in_float64():
        _thread.start_new_thread(builtins.__import__, ("made_for_a_thread",))
        until = time.monotonic() + 20
        while "made_for_a_thread" not in sys.modules and not failed and time.monotonic() < until:
            time.sleep(0.01)
    assert failed == []
    assert sys.modules.pop("made_for_a_thread").number == 1
