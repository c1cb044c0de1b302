"""PyTorch's private names stand in `torch_internals` only, and each of them is there in the installed version."""

import ast
import inspect
import logging
import math
import pickletools
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import samestep
from samestep.torch_internals import (
    autograd,
    checkpoint_index,
    compiler,
    dataloading,
    elastic,
    fakes,
    foreach,
    groups,
    modules,
    operators,
    optimizers,
    pytree,
    sharded,
    tensors,
)

pytestmark = pytest.mark.quick

SOURCE = Path(samestep.__file__).parent
INTERNALS = SOURCE / "torch_internals"
FILES = [file for file in sorted(SOURCE.rglob("*.py")) if "templates" not in file.parts]

# Public in spite of their underscore.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
# Private names of other packages, which are used where these are.
OF_OTHERS = {
    "_exit": "os",
    "_exit_function": "multiprocessing",
    "_attn_implementation": "transformers",
    "_from_config": "transformers",
    "_getframe": "sys",
    "_run_exitfuncs": "atexit",
    "_SubParsersAction": "argparse",
    "_actions": "argparse",
    "_option_string_actions": "argparse",
    "_callback": "multiprocessing",
    "_args": "multiprocessing",
    "_cleanup": "multiprocessing",
    "_config": "multiprocessing",
    "_finalizer_registry": "multiprocessing",
    "_forkserver": "multiprocessing",
    "_forkserver_pid": "multiprocessing",
    "_inheriting": "multiprocessing",
    "_target": "multiprocessing",
    "_INSTRUCTION_MAP": "deepspeed",
    "_WORLD_GROUP": "deepspeed",
    "_dp_group": "deepspeed",
    "_get_optimizer_loss_scale": "deepspeed",
    "_hp_mapping": "deepspeed",
    "_release_process_group_references": "deepspeed",
    "_reset_state": "accelerate",
    "_validate_launch_command": "accelerate",
}
BY_TEXT = {"getattr", "hasattr", "setattr", "delattr"}


# Where a class gives a private name to a method or an attribute of its own.
GIVEN = re.compile(
    r"\b(?:def|class) (_\w+)|^ +(_\w+)(?:: [^=\n]+)? = |^ +(_\w+): "
    r"|\b(?:self|cls)\.(_\w+)(?=[^=\n()]*(?:\[[^=\n]*)? = )",
    re.MULTILINE,
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names(text: str) -> frozenset[str]:
    """Private names of a module's own methods and attributes."""
    return frozenset(name for names in GIVEN.findall(text) for name in names if name)


def is_own(owner: ast.expr) -> bool:
    """Whether an expression is the object itself, or its base class."""
    owner = owner.func if isinstance(owner, ast.Call) else owner
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Private names that are imported from PyTorch, also as a part of a module's name."""
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = f"{base}{alias.name}"
        if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
            yield name


def looked_up(node: ast.AST, own: frozenset[str], everywhere: frozenset[str]) -> str | None:
    """A private name that an object is asked for, and that samestep didn't give it.

    `own`: the names that the module gives to attributes; `everywhere`: those that any module gives, one of which a
    subclass elsewhere may use.
    """
    name, known = "", own
    if isinstance(node, ast.Attribute):
        name, known = node.attr, own | everywhere if is_own(node.value) else own
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_TEXT:
        text = node.args[1] if len(node.args) > 1 else None
        name = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
    is_ours = name in known or name in OF_NAMED_TUPLES or name in OF_OTHERS
    return name if is_private(name) and not is_ours else None


def overridden(kind: ast.ClassDef, origins: Mapping[str, str]) -> Iterator[str]:
    """Private methods of PyTorch's classes that a subclass replaces; `origins`: where a module's names are from."""
    methods = [method.name for method in kind.body if isinstance(method, ast.FunctionDef) and is_private(method.name)]
    for base in map(ast.unparse, kind.bases if methods else ()):
        first, dot, rest = base.partition(".")
        if origins.get(first, "").split(".")[0] == "torch":
            parent = resolve_name((origins[first] + dot + rest).partition("[")[0])
            yield from (name for name in methods if hasattr(parent, name))


def is_mentioned(text: str) -> bool:
    """Whether a text is a private name of PyTorch's, such as a module's or an attribute's."""
    return text in NAMES or re.fullmatch(r"torch(\.\w+)*\._[\w.]+", text) is not None


def private_names(text: str, everywhere: frozenset[str] = frozenset()) -> list[str]:
    """The private names of PyTorch that a module uses, with their lines."""
    own = own_names(text)
    found: list[tuple[int, str]] = []
    origins: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            origins |= {alias.asname or alias.name.split(".")[0]: base + alias.name for alias in node.names}
            found += [(node.lineno, name) for name in imported(node)]
        elif isinstance(node, ast.ClassDef):
            found += [(node.lineno, name) for name in overridden(node, origins)]
        elif isinstance(node, ast.Attribute | ast.Call) and (name := looked_up(node, own, everywhere)):
            found.append((node.lineno, name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_mentioned(node.value):
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id in origins:
            origins[ast.unparse(node.target)] = origins[node.value.id]  # another name of it
    return [f"{line}: {name}" for line, name in sorted(set(found))]


# Attributes by name, as wrappers, hooks and pickles mention them.
NAMES = {
    "_fsdp_wrapped_module",
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_local_tensor",
    "_get_layout",
    "_modules",
}


@pytest.mark.usefixtures("uncollected")
def test_private_names_of_pytorch_stand_in_torch_internals_only() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in FILES}
    everywhere = frozenset(name for text in texts.values() for name in own_names(text))
    found = {
        str(file.relative_to(SOURCE)): names
        for file, text in texts.items()
        if INTERNALS not in file.parents and (names := private_names(text, everywhere))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch import _C",
        "def late():\n    from torch.utils._pytree import tree_map",
        "from torch.distributed.tensor._utils import compute_local_shape_and_global_offset",
        "import torch\ntorch._foreach_add_([], [])",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map",
        "def local(tensor):\n    return tensor._local_tensor",
        "def local(tensor):\n    return getattr(tensor, '_local_tensor', tensor)",
        "INSIDE = {'OptimizedModule': '_orig_mod'}",
        "from importlib import import_module\nimport_module('torch._inductor.config')",
        "from torch.optim import Optimizer\nclass Mine(Optimizer):\n    def _patch_step_function(self): ...",
        "from torch import nn\nclass Mine(nn.Module):\n    def forward(self):\n        return self._parameters",
        "from torch import nn\nclass Mine(nn.Module):\n    def _apply(self, fn):\n        return super()._apply(fn)",
    ],
)
def test_a_private_name_is_found(text: str) -> None:
    assert private_names(text) != []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.__version__",
        "from samestep.torch_internals import pytree",
        "class Mine:\n    def __init__(self):\n        self._base = 1\n    def f(self):\n        return self._base",
        "class Mine:\n    _step: int\n    def other(self, mine):\n        return mine._step",
        "import os\nos._exit(0)",
        "def renamed(one):\n    return one._replace(a=1)",
    ],
)
def test_other_private_names_are_no_pytorchs(text: str) -> None:
    assert private_names(text) == []


# Each of them does what its users rely on.


def test_nested_values_are_opened_and_closed() -> None:
    value = {"a": [torch.zeros(2), 3], "b": (torch.ones(1),)}
    leaves, spec = pytree.tree_flatten(value)
    assert pytree.tree_leaves(value) == leaves
    assert len(leaves) == 3
    again = pytree.tree_unflatten(leaves, spec)
    assert again["a"][1] == 3
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(value)]
    assert paths == ["['a'][0]", "['a'][1]", "['b'][0]"]
    assert pytree.tree_flatten_with_path(value)[0] == pytree.tree_leaves_with_path(value)
    assert pytree.tree_map_only(int, lambda number: number + 1, value)["a"][1] == 4
    assert pytree.tree_map_with_path(lambda path, leaf: len(path), value)["b"] == (2,)


class Names(operators.EagerMode):
    """The names of the operators that run, and whether they change an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((operators.schema(func).name, operators.schema(func).is_mutable))
        return func(*args, **(kwargs or {}))


def test_modes_see_operators_by_their_schemas() -> None:
    assert operators.innermost_mode() is None
    with Names() as names:
        torch.ones(2).add_(1)
        assert operators.innermost_mode() is names
        assert operators.active_modes()[-1] is names
        with operators.without_modes():
            assert operators.innermost_mode() is None
            torch.zeros(3).mul_(2)
    assert names.seen[-1] == ("aten::add_", True)
    assert not any("mul" in name for name, _ in names.seen)
    assert isinstance(names, operators.TorchDispatchMode)
    assert not operators.is_traceable_wrapper_subclass(torch.ones(2))
    add, one, other = torch.ops.aten.add.Tensor, torch.ones(2), torch.zeros(2)
    assert operators.arguments_by_name(add, (one, other), {"alpha": 2}) == {"self": one, "other": other, "alpha": 2}


class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("context", [operators.DisableTorchFunction, operators.DisableTorchFunctionSubclass])
def test_functions_of_subclasses_are_passed_by(context: Any) -> None:
    tensor = torch.ones(2).as_subclass(Counted)
    before = Counted.calls
    with context():
        assert tensor.add(1).tolist() == [2, 2]
    assert Counted.calls == before
    tensor.add(1)
    assert Counted.calls > before


def test_operators_without_a_public_name() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    output, lse = operators.flash_attention_for_cpu(query, key, value, 0.0, True, attn_mask=None, scale=None)
    scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(output, scores.softmax(-1) @ value)
    upstream = torch.randn_like(output)
    expected = torch.autograd.grad(scores.softmax(-1) @ value, (query, key, value), upstream)
    gradients = operators.flash_attention_for_cpu_backward(
        upstream, query, key, value, output, lse, 0.0, True, attn_mask=None, scale=None
    )
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)
    accelerators = (operators.flash_attention, operators.flash_attention_backward)  # which this machine may not have
    assert all("scale" in str(each.default._schema) for each in accelerators)
    assert len(operators.ATTENTION_KERNELS) == 5
    tensor = torch.arange(6.0)
    assert operators.to_copy(tensor, dtype=torch.float64).dtype == torch.float64
    assert operators.unsafe_view(tensor, [2, 3]).shape == (2, 3)
    ends = torch.tensor([1, 3], dtype=torch.int32)
    rows, weights = torch.randn(3, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    grouped = operators.grouped_mm(rows, weights, offs=ends)
    expected = torch.cat([rows[:1] @ weights[0], rows[1:] @ weights[1]])
    torch.testing.assert_close(grouped, expected, rtol=0.02, atol=0.02)  # bfloat16


def test_operations_on_lists() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [norm.item() for norm in foreach.norm(tensors)] == [5, 1]
    foreach.mul_(tensors, 2)
    foreach.div_(tensors, 4)
    foreach.add_(tensors, [torch.ones(2), torch.ones(1)])
    assert [tensor.tolist() for tensor in tensors] == [[2.5, 3.0], [1.5]]
    foreach.copy_(tensors, [torch.tensor([7.0, 8.0]), torch.tensor([9.0])])
    assert tensors[1].item() == 9
    foreach.zero_(tensors)
    assert tensors[0].tolist() == [0, 0]


def test_memory_and_history_of_tensors() -> None:
    whole = torch.zeros(4, requires_grad=True)
    part = whole[1:]
    assert tensors.base_of(part) is whole
    assert tensors.base_of(whole) is None
    assert tensors.is_view(part)
    assert not tensors.is_view(whole)
    one, other = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert tensors.storage_id(one.untyped_storage()) == tensors.storage_id(one[1:].untyped_storage())
    assert tensors.storage_id(one.untyped_storage()) != tensors.storage_id(other.untyped_storage())
    before = tensors.version_of(whole)
    with torch.no_grad():
        part.add_(1)
    assert tensors.version_of(whole) == before + 1
    tensors.look_up_constructors()
    with torch.device("meta"):
        assert torch.ones(2).is_meta
    assert tensors.takes_over_memory(torch.device("cpu"))


def test_hooks_on_gradients() -> None:
    plain, hooked, afterwards = (nn.Parameter(torch.zeros(1)) for _ in range(3))

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    hooked.register_hook(hook)
    afterwards.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [tensors.has_gradient_hooks(each) for each in (plain, hooked, afterwards)] == [False, True, True]
    assert tensors.gradient_hooks(hooked) == [hook]
    assert tensors.gradient_hooks(plain) == []


class Described(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_a_tensor_without_memory_of_a_class() -> None:
    made = tensors.wrapper_subclass(Described, (3, 2), dtype=torch.float64, device="cpu", requires_grad=True)
    assert type(made) is Described
    assert (made.shape, made.dtype, made.requires_grad) == ((3, 2), torch.float64, True)


def test_registries_of_modules() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    assert modules.own_parameters(module) == {"weight": None, "bias": None}
    assert set(modules.own_buffers(module)) == {"running_mean", "running_var", "num_batches_tracked", "unsaved"}
    assert modules.unsaved_buffers(module) == {"unsaved"}
    modules.save_no_buffers(module)
    assert module.state_dict() == {}
    modules.set_parameters(module, {"weight": nn.Parameter(torch.ones(3))})
    assert list(module.state_dict()) == ["weight"]
    both = nn.ModuleDict({"a": module})
    assert modules.own_children(both) == {"a": module}
    modules.set_children(both, {"b": module})
    assert list(both.state_dict()) == ["b.weight"]
    assert set(modules.REGISTRIES) <= vars(module).keys()


def test_what_a_module_is_cast_to_is_read() -> None:
    device, dtype, *_ = modules.read_to(torch.float32)
    assert (device, dtype) == (None, torch.float32)


def test_marks_of_modules() -> None:
    assert all(issubclass(kind, modules.AnyBatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(issubclass(kind, modules.AnyDropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    norm = next(each for each in layer.modules() if isinstance(each, modules.SpectralNorm))
    assert set(modules.own_buffers(norm)) == set(modules.SPECTRAL_NORM_VECTORS)
    plain = nn.Linear(2, 2)
    compiled: Any = torch.compile(plain, backend="eager")
    assert not modules.is_compiled(plain)
    assert modules.is_compiled(compiled)
    assert modules.own_children(compiled)[modules.WRAPPERS["OptimizedModule"]] is plain
    before = plain.weight.detach().clone()
    modules.apply_to_tensors(plain, lambda tensor: tensor + 1)
    torch.testing.assert_close(plain.weight.detach(), before + 1)


def test_settings_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config, "cpp_cache_precompile_headers", True)
    compiler.avoid_precompiled_headers()
    assert compiler.COMPILER in sys.modules
    assert fakes.FAKES_LOGGER in logging.root.manager.loggerDict
    assert not config.cpp_cache_precompile_headers


def test_hooks_of_modules() -> None:
    layer = nn.Linear(2, 2)
    assert modules.forward_hooks(layer) == modules.backward_hooks(layer) == []
    layer.register_forward_hook(print)
    layer.register_forward_pre_hook(print)
    layer.register_full_backward_hook(print)
    layer.register_full_backward_pre_hook(print)
    assert modules.forward_hooks(layer) == modules.backward_hooks(layer) == [print, print]
    (number,) = modules.hooks_after_forward(layer)
    assert not modules.takes_keywords(layer, number)
    handle = layer.register_forward_hook(lambda *_: None, with_kwargs=True)
    assert list(modules.hooks_after_forward(layer)) == [number, handle.id]
    assert modules.takes_keywords(layer, handle.id)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.neg else result


class Adding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 2 if func is torch.neg else result


def test_function_modes_of_a_class_are_left_out() -> None:
    one = torch.ones(1)
    with Adding(), Doubling():
        assert torch.neg(one).item() == 2
        with operators.without_function_modes(Doubling):
            assert torch.neg(one).item() == 1
            with pytest.raises(ValueError, match="inside"), operators.without_function_modes(Adding):
                raise ValueError("inside")
        assert torch.neg(one).item() == 2
    assert torch.neg(one).item() == -1


def test_where_a_backward_is() -> None:
    order: list[str] = []

    def hook(_: torch.Tensor) -> None:
        order.append(f"in backward: {autograd.is_in_backward()}")
        autograd.at_end_of_backward(lambda: order.append("the end"))

    weight = torch.ones(2, requires_grad=True)
    hidden = weight * 2
    hidden.register_hook(hook)
    weight.register_hook(lambda _: order.append("the last gradient"))
    hidden.sum().backward()
    assert order == ["in backward: True", "the last gradient", "the end"]
    assert not autograd.is_in_backward()


def test_a_backward_in_two_halves_is_that_in_one() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    given = torch.randn(5, 3, requires_grad=True)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(given).square().sum(), [given, *weights])
    loss = model(given).square().sum()
    groups = autograd.backward_of_inputs([loss], [torch.ones(())], [given], weights)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, expected[0])
    assert weights[0].grad is None
    autograd.backward_of_weights(weights, groups)
    for weight, gradient in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_the_state_of_schedules_and_of_loss_scaling() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizers.take_step(schedule, 3)
    assert optimizer.param_groups[0]["lr"] == 1 / 4
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=2.0)
    for value, expected in ((math.inf, 1), (1.0, 0)):
        weight.grad = None
        (scaler.scale(weight * value).sum()).backward()
        scaler.unscale_(optimizer)
        assert [flag.item() for flag in optimizers.overflowed(scaler, optimizer).values()] == [expected]
        scaler.step(optimizer)
        scaler.update()


def test_iterators_of_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "_reset"):
        monkeypatch.setattr(dataloading.BATCH_ITERATOR, name, getattr(dataloading.BATCH_ITERATOR, name))
    begun: list[Any] = []

    def note(iterator: Any, loader: Any) -> None:
        begun.append(loader)
        numbers = dataloading.numbers_of(iterator)
        dataloading.replace_numbers(iterator, (list(reversed(batch)) for batch in numbers))

    dataloading.call_at_begin(note)
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in loader] == [[1, 0], [3, 2]]
    assert begun == [loader]
    assert dataloading.has_numbered_samples(loader)

    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert not dataloading.has_numbered_samples(torch.utils.data.DataLoader(Endless()))
    assert callable(dataloading.WORKER)


def test_tensors_without_memory() -> None:
    keys: list[Any] = []

    class Mode(fakes.QuickFakeMode):
        def add_to_key(self, key: list[Any], args: Any, others: tuple[Any, ...]) -> None:
            keys.append(args)
            super().add_to_key(key, args, others)

    with Mode() as mode:
        product = torch.ones(2, 3) @ torch.ones(3, 4)
        with pytest.raises(fakes.DataDependentOutputException):
            product.sum().item()
        with pytest.raises(fakes.DynamicOutputShapeException):
            product.nonzero()
    assert isinstance(product, fakes.FakeTensor)
    assert isinstance(mode, fakes.FakeTensorMode)
    assert product.shape == (2, 4)
    assert keys, "PyTorch builds the keys of its cache otherwise: what `valueless.py` makes faster isn't used"


def test_a_group_without_other_ranks() -> None:
    calls: list[str] = []

    def wrap(call: Any) -> Any:
        return lambda *args: (calls.append("a whole shape"), call(*args))[1]

    dist.init_process_group("fake", store=fakes.fake_store(), rank=1, world_size=4)
    restore = fakes.swap_tensor_meta(wrap)
    try:
        mesh = init_device_mesh("cpu", (4,))
        parts = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
        fakes.forget_meshes()
        parts.sin().sum()
        assert sharded.local_part(parts).shape == (2, 2)
        assert sharded.offset_of(parts) == (2, 0)
        assert calls
        restore()
        fakes.forget_meshes()
        calls.clear()
        parts.cos().sum()
        assert calls == []
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert sharded.shard_counts(model) == [4]  # pyright: ignore[reportArgumentType]
        message = functional.all_reduce(torch.ones(2), "sum", mesh)
        assert isinstance(message, sharded.AsyncCollectiveTensor)
        functional.wait_tensor(message)
    finally:
        restore()
        dist.destroy_process_group()
        fakes.forget_meshes()
    plain = torch.ones(2)
    assert sharded.local_part(plain) is plain


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of gloo with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_process_groups() -> None:
    more: Any = dist.new_group([0])
    world = dist.group.WORLD
    assert groups.all_groups() == (world, more)
    assert list(groups.members_of_groups().values()) == [{0: 0}, {0: 0}]
    groups.default_store().set("key", "value")
    assert groups.default_store().get("key") == b"value"
    assert groups.group_named(more.group_name) is more
    before = groups.sequence_number(more)
    dist.all_reduce(torch.ones(1), group=more)
    assert groups.sequence_number(more) == before + 1
    assert groups.serves(more, torch.device("cpu"))
    assert not groups.serves(more, torch.device("meta"))
    assert isinstance(groups.backend_for_cpu(more), dist.ProcessGroupGloo)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert groups.flattened(mesh, "a+b").mesh_dim_names == ("a+b",)
    assert groups.FakeWork().wait()


def test_a_group_with_methods_in_python() -> None:
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    groups.count_collectives(gloo)

    class Group(groups.PythonGroup):
        def entered_collectives(self) -> int:
            return 7

        def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
            return groups.all_gather_single(gloo, output, input, opts)

        def reduce_scatter_single(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> Any:  # noqa: N803
            return groups.reduce_scatter_single(gloo, outputTensor, inputTensor, opts)

    group = Group(0, 1)  # pyright: ignore[reportCallIssue]  # the stub has one more
    groups.answer_for_cpu(group, gloo)
    assert groups.sequence_number(group) == 7
    assert groups.serves(group, torch.device("cpu"))
    given, taken = torch.arange(3.0), torch.zeros(3)
    group.all_gather_single(taken, given, AllgatherOptions()).wait()
    assert taken.tolist() == [0, 1, 2]
    group.reduce_scatter_single(given, torch.ones(3), dist.ReduceScatterOptions()).wait()
    assert given.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("alone")
def test_ddp_leaves_parameters_out() -> None:
    module = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    with sharded.left_out_of_ddp(module, ["other.weight"]):
        wrapped = nn.parallel.DistributedDataParallel(module)
    assert wrapped.parameters_to_ignore >= {"other.weight"}
    assert nn.parallel.DistributedDataParallel(module).parameters_to_ignore == set()


@pytest.mark.usefixtures("alone")
def test_a_zero_optimizer_hands_on_parameters_of_any_dtypes() -> None:
    sent: list[Any] = []
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1, dtype=torch.float64))]
    kind = sharded.zero_optimizer(lambda of_ranks, group: sent.append((of_ranks, group)))
    optimizer = kind(weights, optimizer_class=torch.optim.SGD, lr=1.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weights[0].tolist() == [0, 0]
    [(of_ranks, group)] = sent
    assert {id(weight) for weight in of_ranks[0]} == {id(weight) for weight in weights}
    assert group is dist.group.WORLD


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated, and warns of a CPU and of a single rank
@pytest.mark.parametrize("original", [False, True])
def test_the_flat_parameters_of_fsdp1(original: bool) -> None:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    wrapped = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=original)
    handle = sharded.flat_handle(wrapped)
    assert handle is not None
    assert sharded.flat_handle(layers) is None
    assert modules.own_children(wrapped)[modules.WRAPPERS["FullyShardedDataParallel"]] is layers
    parts = sharded.flat_parts(handle.flat_param)
    assert [(part.name, part.shape, part.count) for part in parts] == [
        ("0.weight", (2, 3), 6),
        ("0.bias", (2,), 2),
        ("1.weight", (1, 2), 2),
        ("1.bias", (1,), 1),
    ]
    padded = [0, 8, 12, 16] if original else [0, 6, 8, 10]  # to 16 bytes
    assert [part.place for part in parts] == padded
    assert len(sharded.unflattened(handle.flat_param)) == (4 if original else 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_index_of_a_checkpoint(tmp_path: Path) -> None:
    dcp.save({"weight": torch.arange(3.0)}, checkpoint_id=tmp_path, no_dist=True)
    pickled = (tmp_path / ".metadata").read_bytes()
    names = {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}
    assert {*checkpoint_index.LAYOUT_FUNCTION, *(kind.__name__ for kind in checkpoint_index.CLASSES)} <= names


def test_pytorchs_agent_has_the_steps_that_are_replaced() -> None:
    steps = ("rendezvous", "assign_worker_ranks", "start_workers", "monitor_workers", "stop_workers", "shutdown")
    for name in (*steps, "exit_barrier"):
        own, base = (getattr(kind, f"_{name}") for kind in (elastic.ElasticAgent, LocalElasticAgent))
        parameters = list(inspect.signature(own).parameters)
        if name == "shutdown" and "timeout" not in inspect.signature(base).parameters:
            parameters.remove("timeout")  # PyTorch 2.11
        assert parameters == list(inspect.signature(base).parameters), name


class Context:
    """The ranks' processes; notes how they are closed."""

    def __init__(self) -> None:
        self.closed: list[tuple[object, ...]] = []

    def close(self, *how: object) -> None:
        self.closed.append(how)


@pytest.mark.parametrize("takes_timeout", [True, False], ids=["now", "2.11"])
def test_ranks_have_the_agents_own_time_to_end(takes_timeout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes_timeout:
        shutdown = lambda agent, death_signal: agent._pcontext.close(death_signal)  # noqa: E731
        monkeypatch.setattr(LocalElasticAgent, "_shutdown", shutdown)
    elif not elastic._TAKES_TIMEOUT:
        pytest.skip("this PyTorch's agent takes no timeout")
    monkeypatch.setattr(elastic, "_TAKES_TIMEOUT", takes_timeout)
    monkeypatch.setattr(LocalElasticAgent, "__init__", lambda agent: None)
    agent = elastic.ElasticAgent(shutdown_timeout=7)
    agent._worker_watchdog = agent._health_check_server = None
    agent._pcontext = context = Context()
    agent._shutdown()  # as the agent's run() calls it in PyTorch 2.11
    assert context.closed[0] == (signal.SIGTERM, 7)
