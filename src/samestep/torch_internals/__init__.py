"""The only place of PyTorch's private names: what each is used for, and what of it is relied on.

PyTorch may change what begins with an underscore in any release, so every use of it stands here, in a function or
under a name of its own, and `tests/test_torch_internals.py` calls each: that file is what to run first with another
version of PyTorch. `docs/tested.md` lists the versions that were tried. A name that is missing raises ImportError or
AttributeError with that name, where the module is imported or the function is called, unless its docstring names
another way.

- `pytree`, `operators`, `foreach`: nested values; operators and modes; operations on lists of tensors
- `tensors`, `modules`, `autograd`, `optimizers`, `dataloading`: what PyTorch's objects know of themselves
- `fakes`: tensors without memory, groups without other ranks
- `compiler`: settings of the compiler
- `groups`: process groups and their back ends
- `sharded`, `checkpoint_index`, `elastic`: these import what `import torch` doesn't: DTensor, checkpoints, the agent
"""
