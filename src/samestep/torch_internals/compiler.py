"""PyTorch's compiler: its module and its settings. Importing this doesn't import PyTorch."""

COMPILER = "torch._dynamo"  # the module


def avoid_precompiled_headers() -> None:
    """Compile every C++ kernel with its headers. Precompiled ones lie in PyTorch's own folder, whatever was chosen.

    Imports the compiler's settings, which `import torch` doesn't.
    """
    from torch._inductor import config

    config.cpp_cache_precompile_headers = False
