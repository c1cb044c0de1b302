"""Stands in for OpenSSH in tests: the remote host is this one. It writes its words down, as `ps` would show them."""

import json
import os
import sys
from pathlib import Path

words = sys.argv[1:]
with Path(os.environ["FAKE_SSH_LOG"]).open("a", encoding="utf-8") as file:
    file.write(json.dumps(words) + "\n")
host, *line = words[words.index("--") + 1 :]
if "-G" in words:
    print("user nobody\nhostname 127.0.0.1\nport 22")
elif host == "gone":
    print("ssh: connect to host gone port 22: No route to host", file=sys.stderr)
    sys.exit(255)
else:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_COLOUR")}
    os.execve("/bin/sh", ["sh", "-c", " ".join(line)], environ)
