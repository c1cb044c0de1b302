"""The rules of the house: who may import whom, what stands in one place only, and what isn't loaded at the start."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import samestep

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("uncollected")]

SOURCE = Path(samestep.__file__).parent

# The wings of the house: from which others each may import, and what is in it. `display/tables` is a module whose
# package is of another wing.
WINGS: Mapping[str, tuple[str, str]] = {
    "base": (
        "",
        "errors limits synonyms sizes input_files output_files durations host_names variables launchers ranks "
        "environment version private_folders layout yaml_loader validation field_types communication recipe job "
        "options plausibility run_folder subprocess_group processor progress file_errors streams jobfile extras "
        "plugins hooks "
        "torch_internals "
        "display/tables display/page display/steps_figure display/columns display/curves_svg display/schedule_svg",
    ),
    "prove": ("base", "recording script_proof spot_checks"),
    "launch": ("base", "launch fault_tolerance"),
    "train": (
        "base prove launch",
        "data tasks comm profiling loggers parallel training checkpoint convert contract verification rank_imports "
        "rank_tasks door api job_check inference engines/__init__ engines/registry engines/base "
        "engines/precision engines/setup engines/checks engines/config_file engines/native engines/data_parallel",
    ),
    "plan": ("base launch train", "planning job_plan"),
    "engines": ("base launch train", "engines translate"),
    "lab": ("base launch train engines", "handwritten comparison tuning comm_bench doctor drill"),
    "face": ("base prove launch train plan engines lab", "cli display scaffold"),
}
WING_OF = {name: wing for wing, (_, names) in WINGS.items() for name in names.split()}
ON_THE_MAP = sorted({name.partition("/")[0] for name in WING_OF})

# What stands first inside a package, in order: each imports of its package only itself and those before it.
FOUNDATIONS = {
    "launch": (
        "affinity",
        "memory",
        "device",
        "network",
        "fork_server",
        "options",
        "node_spec",
        "starter",
        "environments",
        "script_env",
    ),
    "engines": ("base", "precision", "setup", "native"),
    "verification": ("steps", "noise", "parts", "job_record", "tensors", "departure", "proof"),
}

# They gather the others' public names and start the command line.
EXEMPT = {"__init__.py", "__main__.py"}

# Programs of users, which `samestep init` copies, are no modules of samestep.
MODULES = sorted(
    path.relative_to(SOURCE).as_posix()
    for path in SOURCE.rglob("*.py")
    if not path.is_relative_to(SOURCE / "templates")
)


def wing_of(module: str) -> str | None:
    """The wing of a module, by itself or by its package; None if it has no place."""
    parts = module.removesuffix(".py").split("/")
    return WING_OF.get("/".join(parts[:2])) or WING_OF.get(parts[0])


parsed = cache(ast.parse)  # several tests look at every module


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: not what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if is_for_type_checkers(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from (other, *nodes(other))
            continue
        yield child
        yield from nodes(child)


@cache
def imported_names(module: str, text: str) -> tuple[tuple[int, str], ...]:
    """The line and the whole name of each import from samestep in a module, also of those inside functions."""
    found: list[tuple[int, str]] = []
    inside = ["samestep", *module.split("/")[:-1]]
    for node in nodes(parsed(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "samestep" and rest != "__version__":
                found.append((node.lineno, samestep._HOME.get(rest, name)))  # samestep.train is samestep.api
    return tuple(found)


def wrong_imports(module: str, text: str) -> list[str]:
    """The imports of a module from wings that its own may not import."""
    wing = wing_of(module)
    assert wing is not None, f"{module} has no place in WINGS"
    allowed = {wing, *WINGS[wing][0].split()}
    wrong: list[str] = []
    for line, name in imported_names(module, text):
        target = module_of(name) if "." in name else None
        if (target and wing_of(target)) not in allowed:
            wrong.append(f"{module}:{line} imports {name if target else 'the whole of samestep'}")
    return wrong


def module_of(name: str) -> str | None:
    """The module that a whole name such as samestep.layout.Layout is of; None for a package without code."""
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        for module in (f"{path}.py", f"{path}/__init__.py"):
            if module in MODULES:
                return module
    return None


def test_a_module_has_its_wing_and_imports_only_from_those_that_it_may() -> None:
    modules = [module for module in MODULES if module not in EXEMPT]
    assert [
        wrong for module in modules for wrong in wrong_imports(module, (SOURCE / module).read_text("utf-8"))
    ] == []


def test_the_wings_form_no_circle_and_name_only_what_there_is() -> None:
    TopologicalSorter({wing: allowed.split() for wing, (allowed, _) in WINGS.items()}).prepare()
    for name in WING_OF:
        assert (SOURCE / f"{name}.py").is_file() or (SOURCE / name).is_dir(), name


def import_circle(texts: Mapping[str, str]) -> list[str] | None:
    """Modules that import each other in a circle, also inside functions; None if there is none."""
    wanted = {module: {module_of(name) for _, name in imported_names(module, text)} for module, text in texts.items()}
    try:
        TopologicalSorter({module: found - {None, module} for module, found in wanted.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_modules_import_each_other_in_a_circle() -> None:
    texts = {module: (SOURCE / module).read_text(encoding="utf-8") for module in MODULES if module not in EXEMPT}
    assert len(texts) > 300
    assert import_circle(texts) is None


def test_a_circle_of_modules_is_found() -> None:
    texts = {
        "layout.py": "from samestep.data import order",
        "data/order.py": "def late():\n    from samestep.data.loader import Loader",
        "data/loader.py": "import samestep.errors\nfrom samestep.layout import Layout",
        "errors.py": "",
    }
    circle = import_circle(texts)
    assert circle is not None
    assert set(circle) == {"layout.py", "data/order.py", "data/loader.py"}
    assert import_circle({**texts, "layout.py": ""}) is None


def wrong_imports_inside(module: str, text: str, order: tuple[str, ...]) -> list[str]:
    """What a module of a package's foundations imports of its package that doesn't stand before it."""
    package, own = (part.removesuffix(".py") for part in module.split("/")[:2])
    allowed = order[: order.index(own) + 1]
    found: list[str] = []
    for line, name in imported_names(module, text):
        words = [*name.split("."), "the whole package"]
        if words[1] == package and words[2] not in allowed:
            found.append(f"{module}:{line} imports {words[2]}")
    return found


@pytest.mark.parametrize("package", FOUNDATIONS)
def test_inside_a_package_its_foundations_import_nothing_of_what_stands_on_them(package: str) -> None:
    order = FOUNDATIONS[package]
    there = [module for module in MODULES if module.startswith(f"{package}/")]
    of_these = [module for module in there if module.split("/")[1].removesuffix(".py") in order]
    assert {module.split("/")[1].removesuffix(".py") for module in of_these} == set(order)
    found = [wrong_imports_inside(each, (SOURCE / each).read_text(encoding="utf-8"), order) for each in of_these]
    assert [line for lines in found for line in lines] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("from samestep.engines.native.trainer import NativeTrainer", 0),
        ("from samestep.engines import base", 0),
        ("from samestep.engines.horovod import Horovod", 1),
        ("from samestep.engines import horovod", 1),
        ("import samestep.engines", 1),
        ("def f():\n    from samestep.engines.registry import engine", 1),
        ("from samestep.parallel.apply import spread", 0),
    ],
)
def test_an_import_inside_a_package_is_found(text: str, wrong: int) -> None:
    assert len(wrong_imports_inside("engines/native/engine.py", text, FOUNDATIONS["engines"])) == wrong


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "ARCHITECTURE.zh-CN.md"])
def test_the_map_has_every_package_once_and_the_wings_with_what_they_may_import(page: str) -> None:
    text = (SOURCE.parent.parent / page).read_text(encoding="utf-8").partition("\n## ")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| \*\*(\w+)\*\* \| ([\w, ]*) \|", text, re.MULTILINE)
    assert {wing: sorted(allowed.split(", ")) for wing, allowed in shown} == {
        wing: sorted(allowed.split() or [""]) for wing, (allowed, _) in WINGS.items()
    }
    rows = [re.findall(r"`(\w+)/?`", cell) for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)]
    assert sorted(name for row in rows for name in row) == ON_THE_MAP


@pytest.mark.parametrize(
    "text",
    [
        "import samestep.cli.main",
        "import samestep",
        "from samestep import cli",
        "from samestep import train",
        "from samestep.engines.native.trainer import step",
        "from ..engines import native",
        "from .. import engines",
        "def f():\n    import samestep.training.step",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import samestep.api",
        "import samestep.elsewhere",
    ],
)
def test_an_import_from_above_is_found(text: str) -> None:
    assert len(wrong_imports("launch/world.py", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import samestep.layout",
        "from samestep import Layout, __version__",
        "from samestep.fault_tolerance.status import Status",
        "from . import local",
        "from .local import start",
        "from ..errors import UserError",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from samestep.engines.native.engine import Native",
    ],
)
def test_an_import_from_below_or_for_type_checkers_is_allowed(text: str) -> None:
    assert wrong_imports("launch/world.py", text) == []


ACCELERATORS = ("cuda", "hip", "mps", "xpu")
DEVICE = re.compile(rf"(?:{'|'.join(ACCELERATORS)})(?::.*)?")  # with its number, if it has one
# torchrun's values of --nproc-per-node, which are translated.
NAMES_FROM_ELSEWHERE = {"translate/torchrun.py"}


def names_accelerators(text: str) -> list[int]:
    """The lines that name a kind of accelerator, such as `torch.cuda`, `tensor.is_cuda` or "cuda:0"."""
    lines = list[int]()
    if not any(name in text for name in ACCELERATORS):  # most modules need not be parsed
        return lines
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Attribute):
            names = [node.attr.removeprefix("is_")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported = [alias.name for alias in node.names]
            names = [part for name in imported for part in name.split(".")]
            names += (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
        else:
            continue
        if any(DEVICE.fullmatch(name) for name in names):
            lines.append(node.lineno)
    return lines


def test_only_the_device_module_knows_the_kind_of_accelerator() -> None:
    found = {module: names_accelerators((SOURCE / module).read_text(encoding="utf-8")) for module in MODULES}
    assert {module for module, lines in found.items() if lines} - NAMES_FROM_ELSEWHERE == {"launch/device.py"}


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.synchronize()",
        "tensor.is_cuda",
        "tensor.cuda()",
        "torch.zeros(1, device='cuda')",
        "torch.device(f'cuda:{index}')",
        "device.type == 'xpu'",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ],
)
def test_a_named_accelerator_is_found(text: str) -> None:
    assert names_accelerators(text) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "# as on cuda",
        '"""Streams, as torch.cuda has them."""',
        "environ['CUDA_VISIBLE_DEVICES']",
        "torch.accelerator.synchronize()",
    ],
)
def test_a_comment_or_a_variable_names_no_accelerator(text: str) -> None:
    assert names_accelerators(text) == []


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def touches_environment(text: str) -> list[int]:
    """The lines that read or write environment variables."""
    lines = list[int]()
    if not any(name in text for name in ENVIRONMENT):  # most modules need not be parsed
        return lines
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        if names & ENVIRONMENT:
            lines.append(node.lineno)
    return lines


def test_environment_variables_are_touched_in_one_module_only() -> None:
    found = {module: touches_environment((SOURCE / module).read_text(encoding="utf-8")) for module in MODULES}
    assert {module for module, lines in found.items() if lines} == {"environment.py"}


@pytest.mark.parametrize(
    "text", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_a_touched_environment_variable_is_found(text: str) -> None:
    assert touches_environment(text) == [text.count("\n") + 1]


HEAVY = {"torch", "numpy", "transformers", "tokenizers", "torchmetrics", "tensorboard", "tensorflow", "deepspeed"}


def loaded_by(statement: str) -> set[str]:
    """The packages that a fresh Python has loaded after a statement."""
    program = f"import json, sys; {statement}; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


START = [
    "import samestep",
    "import samestep; samestep.Recipe, samestep.Layout, samestep.Task",
    "import samestep.jobfile",
    "import samestep.launch.rank_entry",
    *(["import samestep.cli.main"] if "cli/main.py" in MODULES else []),
]


@pytest.mark.parametrize("statement", START)
@pytest.mark.processes
def test_nothing_heavy_is_loaded_at_the_start(statement: str) -> None:
    assert loaded_by(statement) & HEAVY == set()


@pytest.mark.processes
def test_a_heavy_import_is_found() -> None:
    assert "numpy" in loaded_by("import samestep.data.order") & HEAVY


ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(
    [
        *SOURCE.rglob("*.py"),
        *(file for folder in ("benchmarks", "examples", "tools") for file in (ROOT / folder).rglob("*.py")),
    ]
)

# What hands a line of text to a shell, which reads more in it than words.
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
SHELL_WORDS = re.compile(r"\b(shell|{})\b".format("|".join(name.rpartition(".")[2] for name in SHELLS)))

# What runs code that stands in the data that it reads, unless it is told not to.
LOADERS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.load",
    "numpy.load",
    "np.load",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "joblib.load",
    "dill.load",
    "dill.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    # PyTorch's rendezvous keeps its state as a pickle in a store that others reach.
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler.from_backend",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.C10dRendezvousBackend",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.create_backend",
}
# Methods of other packages' objects that unpickle files, or run a folder's own Python code.
LOADING_METHODS = {"load_checkpoint", "load_state", "load_model", "load_weights", "from_pretrained"}
HARMLESS = {
    "from_pretrained": ("trust_remote_code", False),
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "np.load": ("allow_pickle", False),
}
MAY_LOAD = {
    # A rank and the process that it forked, over a pair of sockets that only these two have.
    "engines/parameter_server/worker_process.py": {"pickle.loads"},
    # Only where the caller says that the files are trusted.
    "engines/deepspeed/trainer.py": {"self.engine.load_checkpoint"},
    # Ranks read the call that their own starting process wrote, into a folder that only this user opens.
    "launch/worker.py": {"pickle.loads"},
    # What ranks of this process have left in a folder that only this user opens.
    "rank_tasks.py": {"pickle.loads"},
    # With a loader made of PyYAML's SafeLoader.
    "yaml_loader.py": {"yaml.load"},
}


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call in a program, by the whole name of what is called, whatever it was imported as."""
    tree = parsed(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            first, dot, rest = name.partition(".")
            yield names.get(first, first) + dot + rest, node


def dotted(node: ast.expr) -> str | None:
    """The text of a name such as os.path.join; None for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if isinstance(node, ast.Attribute) and before is not None else None


def constant(call: ast.Call, keyword: str) -> object:
    """The value of a call's keyword, where it is written there; None where the call hasn't got it."""
    for each in call.keywords:
        if each.arg == keyword:
            return each.value.value if isinstance(each.value, ast.Constant) else "computed"
    return None


def shells(text: str) -> list[int]:
    """The lines that hand text to a shell."""
    if SHELL_WORDS.search(text) is None:  # most programs need not be parsed
        return []
    return [
        node.lineno for name, node in calls(text) if name in SHELLS or constant(node, "shell") not in (None, False)
    ]


def unsafe_loads(text: str) -> list[str]:
    """What is called that may run code from the data that it loads."""
    found = []
    for name, node in calls(text):
        owner, _, method = name.rpartition(".")
        of_another = owner and method in LOADING_METHODS and not owner.startswith("samestep")
        if name in LOADERS or of_another:
            keyword, value = HARMLESS.get(method if of_another else name, ("", None))
            if not keyword or constant(node, keyword) is not value:
                found.append(name)
    return found


def test_no_text_goes_through_a_shell() -> None:
    assert len(PROGRAMS) > len(MODULES)
    assert {file.name: shells(file.read_text(encoding="utf-8")) for file in PROGRAMS} == {
        file.name: [] for file in PROGRAMS
    }


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.system(f'ls {folder}')",
        "from os import system as run\nrun('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=wanted)",
        "from subprocess import getoutput\ngetoutput('ls')",
    ],
)
def test_a_shell_is_found(text: str) -> None:
    assert shells(text) == [2]
    assert shells("import subprocess\nsubprocess.run(['ls', folder], shell=False)") == []


def test_nothing_that_is_loaded_runs_code() -> None:
    found = {module: set(unsafe_loads((SOURCE / module).read_text(encoding="utf-8"))) for module in MODULES}
    assert {module: names for module, names in found.items() if names} == MAY_LOAD


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.load(file)",
        "from pickle import loads\nloads(data)",
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=False)",
        "import torch\ntorch.load(file, weights_only=trusted)",
        "import numpy as np\nnp.load(file, allow_pickle=True)",
        "import yaml\nyaml.unsafe_load(text)",
        "accelerator.load_state(folder)",
        "self.engine.load_checkpoint(folder)",
        "import keras\nkeras.models.load_model(file)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(folder)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(folder, trust_remote_code=True)",
        "from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend\ncreate_backend(x)",
    ],
)
def test_a_load_that_may_run_code_is_found(text: str) -> None:
    assert len(unsafe_loads(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(file, weights_only=True)",
        "import numpy as np\nnp.load(file, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import json\njson.load(file)",
        "from safetensors.torch import load_file\nload_file(name)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(folder, trust_remote_code=False)",
        "from samestep.training.state import load_state\nload_state(trainer)",
    ],
)
def test_a_load_that_only_reads_is_allowed(text: str) -> None:
    assert unsafe_loads(text) == []


PACKAGES = sorted(
    path.parent
    for path in SOURCE.rglob("__init__.py")
    if path.parent != SOURCE and not path.is_relative_to(SOURCE / "templates")
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.relative_to(SOURCE).as_posix())
def test_the_guide_of_a_package_names_its_modules_and_no_others(package: Path) -> None:
    text = (package / "__init__.py").read_text(encoding="utf-8")
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    guide = ast.get_docstring(ast.parse(text)) or ""
    missing = modules - set(re.findall(r"\w+", guide))
    assert not missing, f"name {', '.join(sorted(missing))} in the docstring of {package.name}/__init__.py"
    assert set(re.findall(r"`([a-z_0-9]+)`", guide)) - modules == set()


@pytest.mark.processes
@pytest.mark.skipif(not (SOURCE.parents[1] / ".git").exists(), reason="no copy of the repository")
def test_the_runs_of_a_job_are_ignored_in_every_folder() -> None:
    wanted = [f"{folder}runs/job/metrics.jsonl" for folder in ("", "examples/", "src/samestep/templates/")]
    command = ["git", "check-ignore", "--no-index", *wanted, "src/samestep/comparison/runs.py"]
    found = subprocess.run(command, cwd=SOURCE.parents[1], capture_output=True, text=True)
    assert found.stdout.split() == wanted
