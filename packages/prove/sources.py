"""Puts the prover's files, which lie among samestep's, into the wheel and the sdist of samestep-prove."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProverSources(BuildHookInterface[Any]):
    """Includes the files of pyproject.toml, which are patterns below `samestep/`, and the modules beside it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        # In an sdist the sources lie beside this file, in the repository above it.
        root = Path(self.root)
        source = next(folder for folder in (root / "src", root.parent.parent / "src") if folder.is_dir())
        place = "src/" if self.target_name == "sdist" else ""
        for pattern in self.config["files"]:
            files = sorted((source / "samestep").glob(pattern))
            if not files:
                raise FileNotFoundError(f"no file samestep/{pattern} in {source}")
            for file in files:
                build_data["force_include"][str(file)] = place + file.relative_to(source).as_posix()
        for name in self.config["modules"]:
            build_data["force_include"][str(source / name)] = place + name
        if place:
            build_data["force_include"][str(source.parent / "LICENSE")] = "LICENSE"
