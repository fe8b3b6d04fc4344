"""What atroposlib asks of run-api and of the inference server, in one process: importing it takes
seconds.

Called as `python calls.py <request.json> <answer.json>`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import environment_calls
import inference_calls


async def calls(environment: dict[str, Any], inference: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": await environment_calls.calls(**environment),
        "inference": await inference_calls.calls(**inference),
    }


if __name__ == "__main__":
    request_path, answer_path = map(Path, sys.argv[1:])
    answer_path.write_text(json.dumps(asyncio.run(calls(**json.loads(request_path.read_text())))))
