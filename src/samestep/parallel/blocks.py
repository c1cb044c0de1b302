"""The blocks of a model: the repeated layers that are sharded, recomputed and cut one by one."""

from collections.abc import Collection, Sequence

from torch import nn


def find_blocks(model: nn.Module, apart: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The layers of the largest list of like layers in a model, or where there is none its parts with parameters.

    Transformers, and most deep models, keep their repeated layers in one `nn.ModuleList` or `nn.Sequential`, all
    of one class. An encoder-decoder keeps two: of lists that are no part of each other all are taken.
    `apart`: lists of experts, of which a forward calls any or none.
    """
    blocks = repeated_layers(model, apart)
    return blocks or [part for part in model.children() if any(True for _ in part.parameters())]


def repeated_layers(model: nn.Module, apart: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The layers of the outermost lists of like layers; empty where there is no such list."""
    lists = [module for module in model.modules() if _is_list_of_blocks(module) and module not in apart]
    outermost = [
        module for module in lists if not any(module is not other and _holds(other, module) for other in lists)
    ]
    return [block for module in outermost for block in module.children()]


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of at least two like layers, each made of parts and with parameters."""
    children = list(module.children())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) > 1
        and are_of_one_kind(children)
        and any(True for _ in children[0].children())  # a layer of parts, not a lone linear
        and any(True for _ in children[0].parameters())
    )


def are_of_one_kind(children: Sequence[nn.Module]) -> bool:
    """Whether layers are of one class, or of several with a base class of their own, such as those of hybrids."""
    kinds = {type(child) for child in children}
    shared = set.intersection(*(set(kind.__mro__) for kind in kinds))
    return len(kinds) == 1 or (len(kinds) < len(children) and bool(shared - set(nn.Module.__mro__)))


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def with_forward(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks, with lists, which have no forward, replaced by their modules."""
    modules: list[nn.Module] = []
    for block in blocks:
        modules += [block] if has_forward(block) else with_forward(list(block.children()))
    return list(dict.fromkeys(modules))


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a list or dictionary of modules can't."""
    # Asked of the class, since other layouts put a forward of theirs into every module.
    return type(module).forward is not nn.Module.forward


def is_list_of_like(module: nn.Module, *, of_any_size: bool = False) -> bool:
    """Whether a list or dictionary holds several modules of one class, with parameters of the same names and shapes.

    `of_any_size`: compare only the names.
    """
    children = list(module.children())
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(children) < 2:
        return False
    shapes = {
        tuple((name, 0 if of_any_size else p.shape) for name, p in child.named_parameters()) for child in children
    }
    kinds = {type(child) for child in children}
    return len(kinds) == len(shapes) == 1 and shapes != {()} and has_forward(children[0])


def caller_of(model: nn.Module, name: str) -> str:
    """The module whose forward calls the modules of a list: the list itself, or the innermost around it."""
    while name and not has_forward(model.get_submodule(name)):
        name = name.rpartition(".")[0]
    return name
