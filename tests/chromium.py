"""A page opened in headless Chromium: its document once its scripts ran, what its console said, what it fetched."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=8000",  # milliseconds of the page's own clock
)
_NO_PAGE = "not an origin"


@dataclass(frozen=True, kw_only=True)
class Opened:
    document: str
    console: Sequence[str]
    fetched: Sequence[str]  # addresses of the network


def open_page(file: Path, scratch: Path, *, language: str = "en-US") -> Opened:
    """Open a page. Skips the test where there is no Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed; run tools/chromium-package")
    log = scratch / f"net-{language}.json"
    own = [f"--user-data-dir={scratch / language}", f"--log-net-log={log}", f"--lang={language}"]
    command = [program, *_FLAGS, *own, f"--accept-lang={language}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    requests = [event.get("params", {}) for event in json.loads(log.read_text(encoding="utf-8"))["events"]]
    # Chromium's own requests (the time, its updates) come from no page.
    urls = [each["url"] for each in requests if "url" in each and each.get("initiator", _NO_PAGE) != _NO_PAGE]
    return Opened(
        document=done.stdout, console=console, fetched=[url for url in dict.fromkeys(urls) if url.startswith("http")]
    )
