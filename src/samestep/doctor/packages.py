"""What is installed: samestep's own needs and its extras, and what each engine needs."""

import importlib.util
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from samestep.cluster.device import accelerator_names, build
from samestep.doctor.finding import Asked, Finding, ok, problem, warning
from samestep.engines import ENGINES
from samestep.engines.resolve import resolve


def torch_build(asked: Asked) -> Iterator[Finding]:
    """Python, PyTorch and the kind of device it is built for, and the accelerators that it sees."""
    names = accelerator_names()
    text = f"Python {platform.python_version()}, PyTorch {version('torch')} built for {build()}"
    values = {"python": platform.python_version(), "torch": version("torch"), "built_for": build()}
    if names:
        yield ok("PyTorch", f"{text}, {len(names)} x {names[0]}", accelerators=names, **values)
    elif build() != "CPU":
        yield warning(
            "PyTorch",
            f"{text}, and no accelerator is seen",
            "look whether the driver is there (nvidia-smi) and new enough for this build, and whether a container "
            "was given the devices (docker run --gpus all)",
            accelerators=[],
            **values,
        )
    else:
        yield ok("PyTorch", f"{text}, no accelerator", accelerators=[], **values)


def packages(asked: Asked) -> Iterator[Finding]:
    """What samestep must have, in the versions that it asks for, then its extras."""
    try:
        needed = [Requirement(text) for text in requires("samestep") or []]
    except PackageNotFoundError:
        yield warning("packages", "samestep is not installed, it runs from its source", "pip install --editable .")
        return
    always = [each for each in needed if each.marker is None]
    wrong = [text for each in always if (text := _wrong(each)) is not None]
    if wrong:
        yield problem("packages", "; ".join(wrong), "pip install --upgrade samestep")
    else:
        yield ok("packages", ", ".join(f"{each.name} {version(each.name)}" for each in always))
    extras = {
        extra: of_extra
        for extra in sorted({name for each in needed for name in _extras(each)} - {"dev"})
        if (of_extra := [each for each in needed if extra in _extras(each)])
    }
    yield from (_extra(extra, wanted) for extra, wanted in extras.items())


def _extras(requirement: Requirement) -> list[str]:
    """The extras that ask for a requirement, from a marker such as `extra == "images"`."""
    words = str(requirement.marker or "").split('extra == "')[1:]
    return [word.partition('"')[0] for word in words]


def _wrong(requirement: Requirement) -> str | None:
    """Why a requirement is not met; None where it is."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} is {found}, and {requirement.specifier} is wanted"


def _extra(extra: str, wanted: list[Requirement]) -> Finding:
    subject, install = f"extra {extra}", f'pip install --upgrade "samestep[{extra}]"'
    wrong = [(each, text) for each in wanted if (text := _wrong(each)) is not None]
    if not wrong:
        return ok(subject, ", ".join(f"{each.name} {version(each.name)}" for each in wanted), installed=True)
    text = "; ".join(text for _, text in wrong)
    if all(text.endswith("is not installed") for _, text in wrong):
        return ok(subject, text, f"to have it: {install}", installed=False)
    return warning(subject, text, install, installed=True)


def engines(asked: Asked) -> Iterator[Finding]:
    """Which engines can be used with what is installed."""
    for name in ENGINES:
        missing = {
            module: install.removesuffix(" would do")
            for module, install in resolve(name).abilities.packages.items()
            if importlib.util.find_spec(module) is None
        }
        if missing:
            commands = " and ".join(dict.fromkeys(missing.values()))
            text = f"{', '.join(missing)} not installed"
            yield ok(f"engine {name}", text, f"to have it: {commands}", installed=False)
        else:
            yield ok(f"engine {name}", "can be used", installed=True)
