"""Codex 0.171, through the responses API. The argument is its program: `codex`."""

import json
import os
import subprocess
import sys

policy = f'{{name="policy", base_url="{os.environ["OPENAI_BASE_URL"]}", env_key="OPENAI_API_KEY"}}'
command = [sys.argv[1], "exec", "-m", os.environ["OPENAI_MODEL"], "-c", "model_provider=policy"]
command += ["-c", f"model_providers.policy={policy}", "--skip-git-repo-check"]
command += ["-c", "web_search=disabled", "--disable", "multi_agent"]  # tools of OpenAI
command += ["--dangerously-bypass-approvals-and-sandbox"]  # as the sandbox of env-server is enough
row = json.load(sys.stdin)
os.environ["CODEX_HOME"] = os.getcwd()
sys.exit(subprocess.run(command, input=row["prompt"], text=True).returncode)
