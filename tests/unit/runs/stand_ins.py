"""Small programs that replace the services, so that the runner can be tested fast.

They have the module names of the services, and their directory is first in PYTHONPATH. Each writes
its process id to a file in STAND_IN_PIDS. If STAND_IN_TRAINER_LINGERS is set, the trainer does not
end after its last step. It kills the server in STAND_IN_KILLED before its first step. If
STAND_IN_WARNS is set, it logs a warning twice.
"""

from __future__ import annotations

import io
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_core.weights.servers import ServerState, ServerStatus, server_key, servers_key
from grpo_runs.process.stack import Service
from grpo_runs.screen import Screen
from tests.unit.runs.records import BENCHMARK, evaluation, metrics_object


class Shown(Screen):
    """A screen that keeps its output for tests."""

    def __init__(self) -> None:
        self._facts, self._failures = io.StringIO(), io.StringIO()
        super().__init__(Console(file=self._facts), Console(file=self._failures))

    @property
    def out(self) -> str:
        return self._facts.getvalue()

    @property
    def err(self) -> str:
        return self._failures.getvalue()


COMMON = """
import json, os, pathlib, signal, subprocess, sys, time, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def post(url):
    return fetch(urllib.request.Request(url, method="POST", data=b""))

def fetch(request):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            return opener.open(request, timeout=10).read()
        except urllib.error.URLError:  # services start side by side
            time.sleep(0.05)

def serve(answer):  # with the status and the object of answer(path, body, headers)
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answered = answer(self.path, body, self.headers)
            data = json.dumps(answered).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

    ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()

def end_with_parent():
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

def note_pid(name):
    folder = os.environ["STAND_IN_PIDS"]
    half_written = pathlib.Path(f"{folder}.{name}.{os.getpid()}")
    half_written.write_text(str(os.getpid()))
    half_written.replace(pathlib.Path(folder, name))
"""

RUN_API = """
from stand_in_common import *
note_pid("run-api")
seen = set()

def answer(path, body, _headers):
    if path.startswith(("/trainer", "/environment/")):
        seen.add(path)
        return 200, {}
    return 200, {
        "/health": {},
        "/info": {"batch_size": 64 if "/trainer" in seen else -1, "max_token_len": 128},
        "/environments": [
            {"name": path.removeprefix("/environment/") + "_0"}
            for path in sorted(seen)
            if path.startswith("/environment/")
        ],
    }[path]

serve(answer)
"""

STATUS = ServerStatus(
    name="<name>",
    state=ServerState.SERVING,
    epoch=1,
    step=1,
    restarts=5,
    crashes=3,
    generation_tokens=5000,
)
REPORT = [
    ["SADD", servers_key("<run>"), "<name>"],
    ["HSET", server_key("<run>", "<name>"), *chain(*STATUS.on_the_wire().items())],
]
# To import redis and pydantic takes a second of CPU time.
VLLM = f"""
import socket, urllib.parse
from stand_in_common import *
name = option("--server-name") if "--server-name" in sys.argv else "vllm-server"
note_pid(name)
if "--share-weights" in sys.argv:
    pathlib.Path(option("--weights-socket")).touch()
elif not pathlib.Path(option("--weights-dir")).is_dir():
    raise SystemExit("no directory to take weights from")
print("loading", option("--model"), *sys.argv[1:], flush=True)
engine = "from stand_in_common import *; end_with_parent(); note_pid(sys.argv[1]); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", engine, f"{{name}}-engine"], start_new_session=True)
while not pathlib.Path(os.environ["STAND_IN_PIDS"], f"{{name}}-engine").exists():
    time.sleep(0.01)

redis = urllib.parse.urlsplit(os.environ["REDIS_URL"])
with socket.create_connection((redis.hostname, redis.port)) as connection:
    for words in [["AUTH", redis.password], *{REPORT!r}]:
        words = [
            str(word).replace("<run>", option("--run-id")).replace("<name>", name).encode()
            for word in words
        ]
        parts = [b"$%d\\r\\n%b\\r\\n" % (len(word), word) for word in words]
        connection.sendall(b"*%d\\r\\n%b" % (len(words), b"".join(parts)))
        assert not (answered := connection.recv(100)).startswith(b"-"), answered

def answer(*_):
    pathlib.Path(os.environ["STAND_IN_PIDS"] + f".{{name}}.asked").touch()
    return 200, {{}}

serve(answer)
"""

TRAINER = f"""
from stand_in_common import *
note_pid("trainer")
print(*sys.argv[1:], flush=True)
api, steps = option("--run-api-url"), int(option("--steps"))
if "STAND_IN_WARNS" in os.environ:
    for at in ("2026-01-01T10:00:00", "2026-01-01T10:00:01"):
        print(at, "[warning  ] loss.sign    hint=minus service=trainer", flush=True)
post(api + "/trainer")
while json.loads(fetch(api + "/environments")) == []:
    time.sleep(0.05)
if "STAND_IN_KILLED" in os.environ:
    folder, name = os.environ["STAND_IN_PIDS"], os.environ["STAND_IN_KILLED"]
    killed = pathlib.Path(folder, name)
    while not pathlib.Path(f"{{folder}}.{{name}}.asked").exists():  # it counts as ready
        time.sleep(0.05)
    os.kill(int(killed.read_text()), signal.SIGKILL)
template = {metrics_object(1)!r}
with open(option("--metrics-file"), "a") as file:
    for step in range(1, steps + 1):
        line = template | {{"step": step, "steps": steps, "reward/mean": step / steps}}
        if "STAND_IN_KILLED" in os.environ:  # the first publication waited for it in vain
            line |= {{"publication/servers": 2, "publication/all_serve_time": step - 1 or None}}
            line |= {{"publication/servers_left": step - 1}}
            line |= {{"publication/repeated_announcements": 1, "publication/unanswered_checks": 2}}
        file.write(json.dumps(line) + "\\n")
        file.flush()
save_path = pathlib.Path(option("--save-path"))
save_path.mkdir(exist_ok=True, parents=True)
facts = {{"publishes": steps, "mode": option("--mode")}} | {BENCHMARK!r}
(save_path / "benchmark.json").write_text(json.dumps(facts))
if "STAND_IN_TRAINER_LINGERS" in os.environ:
    time.sleep(600)
"""

EVALUATION = evaluation(
    *(None, 0.0),
    **{"task": "arithmetic", "temperature": 1.0, "samples": 8, "item_count": 20},
    **{"intervals": {"pass@1": (0.2, 0.4)}, "duration_s": 0.5},
).model_dump(mode="json")
ENVIRONMENT = f"""
from stand_in_common import *
if "--dry-run" in sys.argv:
    raise SystemExit
note_pid("environment")
print(*sys.argv[1:], flush=True)
if sys.argv[1] == "arithmetic":
    counted = "2026-01-01T10:00:00 [info     ] groups.counted groups_in_progress=0 groups_sent=4"
    print(counted, "failures={{'equal_scores': 204, 'refused': 1}}", flush=True)
post(option("--run-api-url") + "/environment/" + sys.argv[1])
if "STAND_IN_TRAINER_LINGERS" in os.environ:
    time.sleep(600)
if sys.argv[1] == "arithmetic":
    with open(option("--eval-output"), "a") as file:
        for step, rate in ((0, 0.3), (25, 0.75)):
            line = {EVALUATION!r} | {{"step": step, "metrics": {{"pass@1": rate}}}}
            file.write(json.dumps(line) + "\\n")
print("run.completed", flush=True)
"""

TINY_MODEL = """
from stand_in_common import *
pathlib.Path(option("--path-file")).write_text("stand-in-model\\n")
"""


SMOLLM2 = """
import pathlib, sys
assert sys.argv[1:-1] in (["--smollm2", "--path-file"], ["--path-file"])
pathlib.Path(sys.argv[-1]).write_text("made")
"""


FOREVER_S = 3600.0
"""A deadline that no test reaches."""


def script(name: str, code: str, *arguments: object, **changes: Any) -> Service:
    """A service that runs Python code and is healthy at once, unless `changes` says otherwise."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    fields: dict[str, Any] = {"healthy": lambda: True, "deadline_s": FOREVER_S}
    return Service(name, command, **fields | changes)


def write_stand_ins(folder: Path) -> None:
    write_programs(
        folder,
        grpo_api=RUN_API,
        grpo_vllm=VLLM,
        grpo_trainer=TRAINER,
        grpo_tiny_model=TINY_MODEL,
        grpo_env=ENVIRONMENT,
    )


def write_programs(folder: Path, **programs: str) -> None:
    """Packages that `python -m` runs, by their names, and the module that they import from."""
    folder.mkdir(parents=True)
    (folder / "stand_in_common.py").write_text(COMMON)
    for name, code in programs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        (folder / name / "__main__.py").write_text(code)
