"""An agent without a library: asks the policy a sum, then asks it to check the answer."""

import json
import os
import sys
import urllib.request


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["prompt"]}]
messages.append(ask(messages))
messages.append({"role": "user", "content": row["prompt"]})
sys.stdout.write(ask(messages)["content"])
