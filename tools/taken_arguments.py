"""For the site's reference: a function that takes the keywords of a class (`@_takes(Class)`) is shown with them.

mkdocstrings reads sources without running them, and would show the one argument in which the function gets them all.
"""

import re
from typing import Any

import griffe

_TAKES = re.compile(r"_takes\((\w+)\)")


class TakenArguments(griffe.Extension):
    """Gives such a function the parameters of its class, as `inspect.signature` has them."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once all modules of the package are read."""
        for function in _functions(pkg):
            for decorator in function.decorators:
                if (taken := _TAKES.fullmatch(str(decorator.value))) and function.module is not None:
                    described = function.module[taken[1]]
                    parameters = [parameter for parameter in described.parameters if parameter.name != "self"]
                    function.parameters = griffe.Parameters(*parameters)


def _functions(module: griffe.Module) -> list[griffe.Function]:
    """The functions of a package's modules, without methods."""
    functions = [member for member in module.functions.values() if isinstance(member, griffe.Function)]
    for inner in module.modules.values():
        if isinstance(inner, griffe.Module):
            functions += _functions(inner)
    return functions
