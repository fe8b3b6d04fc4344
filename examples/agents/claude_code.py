"""Claude Code 2.1, through Anthropic's messages API. The argument is its program: `claude`."""

import json
import subprocess
import sys

row = json.load(sys.stdin)
command = [sys.argv[1], "-p", "--bare", "--system-prompt", "Answer with a number."]
command += ["--tools", "Bash", "--allowedTools", "Bash"]  # which run in the sandbox of env-server
sys.exit(subprocess.run(command, input=row["prompt"], text=True).returncode)
