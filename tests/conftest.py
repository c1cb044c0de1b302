"""What every test runs under: few threads, quick hypothesis, and an environment left as it was found."""

import gc
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import ModuleType

import pytest
import pytest_randomly
from hypothesis import settings

# Threads of OpenMP that have nothing to do sleep, here and in programs that tests start. They would spin, and where
# other tests want the cores a training on two threads took four times the processor's time so, and ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # PyTorch's OpenMP reads it as it is loaded

# Until all tests are collected: to look for garbage among what is imported takes a sixth of the time, and finds none.
gc.disable()

# Slow machines share these tests: a budget of examples, no deadline for one of them, and the same ones for a change.
settings.register_profile("samestep", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("samestep")

# Several test processes may run beside each other; more threads than cores make each of them slower.
torch.set_num_threads(1)

# Every process that a test starts has this mark, the server included that ranks are forked from.
os.environ["SAMESTEP_TEST"] = str(os.getpid())


# Lines of progress have tests of their own; elsewhere they would stand between what is looked at.
os.environ["SAMESTEP_PROGRESS"] = "none"

# TensorBoard's reader would load TensorFlow, which sets environment variables.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

# pytest's own (which test runs now), and what torch sets when its compiler is first imported.
NOT_OURS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by DeepSpeed, which transformers imports where it is installed
}

MANY_OBJECTS = 100_000

# A name of the module, since multiprocessing forgets its finalizers in a forked child: were this the last reference,
# the child would remove the folder there and then.
_FOLDERS = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Give all that the tests start one folder for temporary files, which goes when the last test is done.

    Those of runs that were killed go as well: their processes no longer hold them locked.

    torchrun, TensorFlow and others leave files in it where a test kills them. pytest's own folders stay where they
    were, for who looks at a failed test.
    """
    # DeepSpeed's: it seeds generators of devices that aren't there, which took a tenth of the short tests' time.
    pytest_randomly.entrypoint_reseeds = []
    if hasattr(config, "workerinput"):
        return  # one of several workers, which have it from their parent
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    from samestep.fault_tolerance.scratch import scratch  # samestep, for which this file prepares

    folder = _FOLDERS.enter_context(scratch("samestep-tests-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # After multiprocessing has removed its own folder in it, which it does at -100.
    multiprocessing.util.Finalize(None, _FOLDERS.close, exitpriority=-200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes first, so that several workers, which take a file at a time, end together."""
    started = {item.path for item in items if not starts_nothing(item)}
    items.sort(key=lambda item: item.path not in started)


# What ranks of many tests would import after their fork, in up to a second each: PyTorch's optimizers of shards, its
# pipelines, a task, and what files of tests import, in which ranks look for their functions; and where a worker takes
# many files, the compiler, which DeepSpeed imports with its optimizers.
PRELOADED = ("torch.distributed.optim", "torch.distributed.pipelining", "samestep.tasks.causal_lm", "pytest")
PRELOADED_BY_WORKERS = ("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported, several hundred thousand objects, out of the garbage collections of all tests.

    Start the server that ranks are forked from, which imports while the first tests run.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if any(not starts_nothing(item) for item in session.items) and not session.config.option.collectonly:
        from samestep.launch import fork_server  # samestep, for which this file prepares

        more = PRELOADED_BY_WORKERS if hasattr(session.config, "workerinput") else ()
        fork_server.preload((*PRELOADED, *more))
        fork_server.ensure_running()


def starts_nothing(item: pytest.Item) -> bool:
    return item.get_closest_marker("quick") is not None and item.get_closest_marker("processes") is None


@pytest.fixture(autouse=True, scope="module")
def what_other_files_imported_is_left_out_of_collections() -> None:
    """Freeze again before a file's tests: a model that is built collects garbage, which took most of its time."""
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def uncollected() -> Iterator[None]:
    """For tests that parse all modules: the search for garbage among them took five times as long as the parser."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def environment_is_left_as_found() -> Iterator[None]:
    """Fail a test that leaves a variable set, changed or removed, and put it back for the tests after it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    leaked = {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if name not in NOT_OURS and before.get(name) != after.get(name)
    }
    for name, (value, _) in leaked.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    if leaked:
        pytest.fail(f"the test changed environment variables (before, after): {leaked}")


@pytest.fixture(scope="session")
def running_test() -> Iterator[FileIO]:
    """A file with the name of the test that runs, beside those of other workers."""
    folder = Path(tempfile.gettempdir()) / "running"
    folder.mkdir(exist_ok=True)
    with FileIO(folder / os.environ.get("PYTEST_XDIST_WORKER", "alone"), "w") as file:
        yield file


@pytest.fixture(autouse=True)
def no_training_takes_a_folder_in_the_current_one(
    request: pytest.FixtureRequest, running_test: FileIO, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test whose training has no folder of its own, for which samestep makes one in runs/.

    In this process at once: a folder that goes again, as where the training is refused later, is seen by the tests
    of other workers. One that another process of the test makes is seen when the test ends; since it may be another
    worker's, all tests that run at the time are named.
    """
    from samestep.run_folder import RunPlace  # samestep, for which this file prepares

    chosen = RunPlace.chosen

    def refuse_without(place: RunPlace) -> Path:
        if place.folder is None and Path.cwd() == request.config.rootpath:
            pytest.fail(f"the training {place.name} has no folder; give it one, or change into tmp_path")
        return chosen(place)

    monkeypatch.setattr(RunPlace, "chosen", refuse_without)
    running_test.seek(0)
    running_test.truncate()
    running_test.write(request.node.nodeid.encode())
    # By its whole path: a test's change of folder may still hold when this fixture ends.
    runs = request.config.rootpath / "runs"
    before = _within(runs)
    yield
    left = _within(runs) - before
    running = [file.read_text(encoding="utf-8") for file in Path(running_test.name).parent.iterdir()] if left else []
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    if left:
        folders, tests = (", ".join(map(str, sorted(names))) for names in (left, running))
        pytest.fail(f"{folders} came to be during one of {tests}; give its trainings a folder")


def _within(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.is_dir() else set()


@pytest.fixture(autouse=True)
def quick_tests_start_no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that is marked quick and starts a process, whose start takes longer than most such tests."""
    if not starts_nothing(request.node):
        return

    def refuse(*arguments: object, **keywords: object) -> None:
        pytest.fail("a test that is marked quick starts a process; mark it processes as well")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that launch jobs."""
    from launching import in_a_folder_of_its_own  # it imports samestep, for which this file prepares

    with in_a_folder_of_its_own(tmp_path, monkeypatch):
        yield
