"""Engines and communication methods that another distribution adds by its pyproject.toml alone."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_engine
from engine_recipes import recipe

import samestep
from samestep.cli.main import main
from samestep.doctor import machine
from samestep.doctor.findings import ExaminationRequest
from samestep.engines import ENGINES
from samestep.errors import UserError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of tests/toy_engine.py, built as any other package."""
    hatchling = pytest.importorskip("hatchling.build")
    folder = tmp_path_factory.mktemp("toy")
    (folder / "pyproject.toml").write_text(toy_engine.PYPROJECT, encoding="utf-8")
    (folder / "toy_engine.py").write_text(Path(toy_engine.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / hatchling.build_wheel(str(folder), {})


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")


@pytest.mark.processes
@pytest.mark.usefixtures("installed")
def test_an_added_engine_and_an_added_method_train_on_several_ranks(tmp_path: Path) -> None:
    wanted = replace(recipe(), communication={"kind": "whole", "every": 2})
    assert type(wanted.communication).__name__ == "WholeOptions"
    proof = samestep.verify(wanted, layout="dp2", engine="toy", device="cpu")
    assert proof.communication == "whole"
    assert max(proof.max_relative_difference.values()) < 1e-10  # it averages whole gradients


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("tyo", r'run.engine is "tyo"; did you mean "toy"\? known: accelerate, broken, .*, native, .*, toy$'),
        (
            "other-name",
            r"toy_engine:Toy has another name \('toy'\); use the same name in its class and its",
        ),
        ("no-engine", r"toy_engine:WholeOptions of toy-samestep 1.0 is no subclass of samestep.engines.base.Engine"),
        (
            "broken",
            r"toy_engine:Missing of toy-samestep 1.0 can't be imported: AttributeError: .*; repair",
        ),
    ],
)
def test_an_added_engine_that_can_not_be_used_is_told(engine: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        samestep.verify(recipe(), engine=engine, device="cpu")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "whol"}, r"communication.kind is 'whol'; did you mean \"whole\"\? known: bf16, .*, whole, .*"),
        ({"kind": "whole", "evry": 2}, r'unknown key "recipe.communication.evry"; did you mean "every"\?'),
        ({"kind": "whole", "every": "x"}, "communication.every is 'x'; it should be a whole number"),
        ({"kind": "without-options"}, "toy_engine:Toy has no options_type with this kind; give it a dataclass"),
    ],
)
def test_wrong_options_of_an_added_method_are_told(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(recipe(), communication=options)


def test_an_engine_of_two_packages_is_told(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("toy", "tin"):
        packages = tmp_path / name
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
        (metadata,) = packages.glob("*.dist-info/METADATA")
        metadata.write_text(metadata.read_text(encoding="utf-8").replace("toy-samestep", f"{name}-samestep"))
        metadata.parent.rename(packages / f"{name}_samestep-1.0.dist-info")
        monkeypatch.syspath_prepend(packages)
    with pytest.raises(UserError, match=r"which tin-samestep 1.0 and toy-samestep 1.0 declare; uninstall all"):
        samestep.verify(recipe(), engine="toy", device="cpu")


@pytest.mark.usefixtures("installed")
def test_lists_of_engines_have_the_added_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    sections = json.loads(capsys.readouterr().out)["$defs"]
    assert "toy" in sections["Run"]["properties"]["engine"]["anyOf"][0]["enum"]
    kinds = sections["Recipe"]["properties"]["communication"]["anyOf"][0]["properties"]["kind"]["enum"]
    assert kinds == ["whole", "without-options"]
    findings = {finding.subject: finding for finding in machine.engines(ExaminationRequest())}
    assert findings["engine toy"].verdict == "ok"
    assert findings["engine broken"].verdict == "warning"
    assert {f"engine {name}" for name in ENGINES} < findings.keys()
