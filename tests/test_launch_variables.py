"""Which variables go to the hosts of a job: by prefix, from files, as asked; and never a secret by accident."""

from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.launch.forwarded_env import files_of, gather, is_secret

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
)
NO_SECRETS = (
    "NCCL_IB_PKEY",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "MONKEY",
    "PYTHONKEYRING",
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
        **dict.fromkeys(SECRETS, "s3cret"),
    }
    found = gather(here)
    assert set(found.values) == {"NCCL_DEBUG", "PYTHONPATH", "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING"}
    assert set(found.kept_back) == set(SECRETS)
    asked = gather(here, asked=["HF_TOKEN", "HOME"])
    assert asked.values["HF_TOKEN"] == "s3cret"
    assert asked.values["HOME"] == "/root"
    assert "HF_TOKEN" not in asked.kept_back
    assert ("HF_TOKEN", "***", "here, by --pass") in asked.shown()


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
    monkeypatch.setenv("WANDB_API_KEY", "w_s3cret")
    assert main(["launch", "--print-variables", "--pass", "HF_TOKEN"]) == 0
    out = capsys.readouterr().out
    assert "NCCL_DEBUG=INFO    (here, by NCCL_*)\n" in out
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
