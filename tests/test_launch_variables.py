"""Which variables go to the hosts of a job: known ones, from files, as asked; and never a secret by accident."""

import os
import re
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.launch.forwarded_env import files_of, gather, is_secret
from samestep.launch.forwarded_names import FAMILIES, NAMES

pytestmark = pytest.mark.quick

SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "SAMESTEP_TOKEN",
    "PYTHON_KEYS",
    "TORCH_HUB_PASSWORD",
    "NCCL_AUTH",
    "CUDA_CREDENTIALS_FILE",
    "GITHUB_PASSWD",
    "my_secret",
    "SAMESTEP_DSN",
    "SENTRY_DSN",
    "SLACK_WEBHOOK",
    "PYTHON_WEBHOOK_URL",
    "TORCHX_JWT",
    "NCCL_BEARER",
    "PYTHON_PWD",
)
NO_SECRETS = (
    "NCCL_IB_PKEY",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "MONKEY",
    "PYTHONKEYRING",
    "PWD",
    "OLDPWD",
)


def test_secrets_are_known_by_their_names() -> None:
    assert [name for name in SECRETS if not is_secret(name)] == []
    assert [name for name in NO_SECRETS if is_secret(name)] == []


def test_what_goes_is_what_a_training_reads() -> None:
    here = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/src",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PATH": "/bin",
        "HOME": "/root",
        # A host's or a process's own:
        "CUDA_VISIBLE_DEVICES": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "SAMESTEP_ENV_FILE": "y",
        "SAMESTEP_ROUND": "1",
        "SAMESTEP_ROUND_FOLDER": "/tmp/round",
        "SAMESTEP_RUN_FOLDER": "/tmp/run",
        "SAMESTEP_MEMORY_FOLDER": "/dev/shm/copies",
        "SAMESTEP_START": "5e1f",
        **dict.fromkeys(SECRETS, "s3cret"),
    }
    found = gather(here)
    assert set(found.values) == {"NCCL_DEBUG", "PYTHONPATH", "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING"}
    assert set(found.kept_back) == set(SECRETS)
    asked = gather(here, passed=["HF_TOKEN", "HOME"])
    assert asked.values["HF_TOKEN"] == "s3cret"
    assert asked.values["HOME"] == "/root"
    assert "HF_TOKEN" not in asked.kept_back
    assert ("HF_TOKEN", "***", "here, by --pass") in asked.shown()


def test_a_variable_is_sent_by_its_name_and_not_by_its_beginning() -> None:
    """Names that no rule for secrets knows either."""
    strange = ["SAMESTEP_HOOK", "NCCL_LICENSE", "TORCHX_SESSION", "PYTHON_DATABASE_URL", "GLOO_ACCOUNT", "CUDA_X"]
    here = {**dict.fromkeys(strange, "s3cret"), "FI_PROVIDER": "efa", "UCX_TLS": "tcp", "OTHER": "x"}
    # Of a container's image or another process, and told to nobody.
    here |= dict.fromkeys(
        ["CUDA_VERSION", "NCCL_VERSION", "PYTHON_SHA256", "PYTHON_PIP_VERSION", "SAMESTEP_RUN"], "1"
    )
    found = gather(here)
    assert found.values == {"FI_PROVIDER": "efa", "UCX_TLS": "tcp"}
    assert found.unknown == tuple(sorted(strange))
    assert gather(here, passed=["NCCL_LICENSE"]).values["NCCL_LICENSE"] == "s3cret"
    assert "NCCL_LICENSE" not in gather(here, passed=["NCCL_LICENSE"]).unknown


def test_the_names_are_no_secrets_and_no_processs_own() -> None:
    names = [name for of_library in NAMES.values() for name in of_library]
    assert len(names) == len(set(names)) > 300
    assert [name for name in names if is_secret(name) or not name.startswith(FAMILIES)] == []
    assert gather(dict.fromkeys(names, "x")).values == dict.fromkeys(names, "x")


@pytest.mark.parametrize("page", ["docs/launch.md", "docs/zh/launch.md"])
def test_the_page_has_the_list(page: str) -> None:
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| (`[A-Z].*`) \|$", text, re.MULTILINE))
    assert {library: tuple(row.replace("`", "").split()) for library, row in rows.items()} == dict(NAMES)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_strangers_file_is_read_only_if_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / ".samestep_env"
    file.write_text("LD_PRELOAD=/evil.so\n", encoding="utf-8")
    assert files_of(None, tmp_path, Path("/none")) == [file]
    os.chown(file, 65534, 65534)
    assert files_of(None, tmp_path, Path("/none")) == []
    assert capsys.readouterr().err == (
        f"samestep: {file} is not read, since it decides what the hosts run: {file} belongs to nobody; "
        f"SAMESTEP_ENV_FILE={file} has it read\n"
    )
    assert files_of(str(file), tmp_path, Path("/none")) == [file]
    os.chown(file, 0, 0)
    file.chmod(0o666)
    assert files_of(None, tmp_path, Path("/none")) == []


def test_the_nearest_file_wins_and_a_file_wins_over_the_environment(tmp_path: Path) -> None:
    folder, home, named = tmp_path / "folder", tmp_path / "home", tmp_path / "named"
    for place in (folder, home):
        place.mkdir()
        (place / ".samestep_env").write_text(f"NCCL_DEBUG={place.name}\nFROM_{place.name}=1\n", encoding="utf-8")
    found = gather({"NCCL_DEBUG": "here"}, files=files_of(None, folder, home))
    assert found.values == {"NCCL_DEBUG": "folder", "FROM_folder": "1", "FROM_home": "1"}
    named.write_text('NCCL_DEBUG = "a = b"\n\n# WANDB_API_KEY=no\nHF_TOKEN=t0\n', encoding="utf-8")
    found = gather({}, files=files_of(str(named), folder, home))
    assert found.values["NCCL_DEBUG"] == "a = b"
    assert found.values["HF_TOKEN"] == "t0"  # written down on purpose
    assert "WANDB_API_KEY" not in found.values
    assert gather({}, files=files_of(str(named), home, home)).sources["NCCL_DEBUG"] == str(named)


def test_the_list_is_printed_without_the_values_of_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    monkeypatch.setenv("NCCL_LICENSE", "n_s3cret")
    monkeypatch.setenv("WANDB_API_KEY", "w_s3cret")
    assert main(["launch", "--print-variables", "--pass", "HF_TOKEN"]) == 0
    out = capsys.readouterr().out
    assert "NCCL_DEBUG=INFO    (here, known of NCCL)\n" in out
    assert "NCCL_LICENSE stays here: samestep doesn't know it; --pass NCCL_LICENSE sends it\n" in out
    assert "HF_TOKEN=***    (here, by --pass)\n" in out
    assert "WANDB_API_KEY stays here" in out
    assert "s3cret" not in out


@pytest.mark.parametrize("line", ["NCCL_DEBUG", "=INFO", "2FAST=1", "export A=1", "A B=1"])
def test_a_wrong_line_is_named_and_not_shown(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "variables"
    file.write_text(f"GOOD=1\n{line}\n", encoding="utf-8")
    monkeypatch.setenv("SAMESTEP_ENV_FILE", str(file))
    assert main(["launch", "--print-variables"]) == 2
    assert f"{file}, line 2: a line such as NCCL_DEBUG=INFO is wanted" in capsys.readouterr().err
    monkeypatch.setenv("SAMESTEP_ENV_FILE", str(tmp_path / "none"))
    assert main(["launch", "--print-variables"]) == 2
    assert "there is no such file" in capsys.readouterr().err
