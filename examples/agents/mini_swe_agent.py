"""mini-swe-agent 2.4 (litellm): an agent that writes commands for a shell."""

import json
import os
import sys
from contextlib import redirect_stdout

os.environ["MSWEA_SILENT_STARTUP"] = "1"

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

model = LitellmTextbasedModel(
    model_name=f"openai/{os.environ['OPENAI_MODEL']}",
    cost_tracking="ignore_errors",
    action_regex=r"```(?:bash|sh)?\s*\n(.*?)\n```",
)
agent = DefaultAgent(
    model,
    LocalEnvironment(timeout=5),
    system_template="Answer with one command for a shell, between lines with three backticks. "
    "For example:\n```bash\necho $((1+2))\n```",
    instance_template="Print the result of {{ task }}",
    step_limit=2,
)
row = json.load(sys.stdin)
with redirect_stdout(sys.stderr):  # litellm's hints
    agent.run(row["prompt"].removesuffix("="))
sys.stdout.write("\n".join(str(message["content"]) for message in agent.messages[3:]))
