"""Faults that stay: a command ends with a named error, beside the services of a whole run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx

from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.redis.server import answers_ping, bundled_redis, redis_command
from grpo_runs.process.ports import free_port
from grpo_tiny_model.model import ensure_tiny_model
from tests.fixtures.health import is_healthy
from tests.fixtures.run_api import start_run_api
from tests.whole_run.commands import ENVIRONMENT, REDIS, RUN_API, SERVER, SHARED, TRAINER
from tests.whole_run.matrix import host
from tests.whole_run.matrix.certificates import Certificate, tls_context
from tests.whole_run.matrix.declared import LIMIT_S, LOAD_S, Fault, Kind, Site
from tests.whole_run.matrix.relay import Damage, relay
from tests.whole_run.matrix.whole_run import ERROR, WAITED_S, Outcome

NAMES = {
    "grpo_env": ENVIRONMENT,
    "grpo_trainer": TRAINER,
    "grpo_api": RUN_API,
    "grpo_vllm": SERVER,
}
"""Of packages."""
_PASSWORD = "invalid username-password pair"
SOON = ("--run-api-deadline-s", "5", "--start-deadline-s", "5")


def local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


class Beside:
    """Where a command runs beside a whole run. `place`: a new directory."""

    def __init__(self, site: Site) -> None:
        self.run, self.place = site.run(SHARED), site.place()
        self.api, self.server = (local(self.run.port(name)) for name in (RUN_API, SERVER))
        self.redis_url = f"redis://127.0.0.1:{self.run.port(REDIS)}/0"

    def ends(
        self,
        who: str,
        says: str,
        *,
        api: str = "",
        server: str = "",
        model: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> Outcome:
        """An environment or a trainer of these services, until it ends. See `ends`."""
        urls = ("--run-api-url", api or self.api, "--inference-url", server or self.server)
        of = ("--model", str(model or ensure_tiny_model()))
        if who == ENVIRONMENT:
            words = ["grpo_env", "arithmetic", "serve", *urls, *of, "--group-size", "4", *SOON]
            return ends(words, self.place, says, variables)
        save = ("--save-path", str(self.place / "save"), "--mode", SHARED)
        with self.run.without_trainer():
            words = ["grpo_trainer", *urls, *of, *save, "--service-deadline-s", "5"]
            return ends(words, self.place, says, variables)


def ends(
    words: list[str], place: Path, says: str, variables: dict[str, str] | None = None
) -> Outcome:
    """Run a command until it ends. It must name its error, and say these words (a pattern)."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(variables or {})}
    began, name = time.monotonic(), words[0]
    process = ManagedProcess(name, [sys.executable, "-m", *words], place / "log", settings)
    with suppress(ProcessFailed):
        process.wait(WAITED_S)
    code, seconds = process.exit_code, time.monotonic() - began
    process.kill()
    log = process.log_path.read_text()
    assert code, f"{name} did not end with an error in time:\n{log[-4000:]}"
    assert re.search(says, log), f"{name} does not say {says!r}:\n{log[-4000:]}"
    named = ERROR.findall(log.rpartition("Traceback")[2])
    assert named, f"{name} ended without a named error:\n{log[-4000:]}"
    return Outcome(f"{NAMES[name]} ends", f"`{named[-1]}`", seconds)


def says_so(words: list[str], place: Path, says: str, variables: dict[str, str]) -> Outcome:
    """Run a command that waits for another service, until its log says why."""
    began = time.monotonic()
    command = [sys.executable, "-m", *words]
    process = ManagedProcess(words[0], command, place / "log", variables)
    try:
        process.wait_until(lambda: bool(re.search(says, process.log_path.read_text())), WAITED_S)
        seconds = time.monotonic() - began
    finally:
        process.kill()
    event = re.findall(r"\[warning *\] (\S+)", process.log_path.read_text())[-1]
    return Outcome("run-api names the reason and waits", f"`{event}`", seconds)


def wrong_token(site: Site, who: str) -> Outcome:
    beside, right = Beside(site), {"RUN_API_TOKEN": "right"}
    api = start_run_api(beside.redis_url, beside.place, environment=right)
    try:
        return beside.ends(who, "401", api=api.url, variables={"RUN_API_TOKEN": "wrong"})
    finally:
        api.process.kill()


def wrong_certificate(site: Site, certificate: Certificate, says: str) -> Outcome:
    beside = Beside(site)
    tls, trusted = tls_context(certificate, beside.place)
    with relay(beside.run.port(RUN_API), Damage(), tls) as port:
        trusts = {"SSL_CERT_FILE": str(trusted)}
        return beside.ends(ENVIRONMENT, says, api=f"https://127.0.0.1:{port}", variables=trusts)


def plain_for_tls(site: Site) -> Outcome:
    beside = Beside(site)
    return beside.ends(ENVIRONMENT, "(?i)ssl|tls", api=beside.api.replace("http", "https"))


def wrong_password(site: Site, who: str) -> Outcome:
    place, port = site.place(), free_port()
    command = redis_command(port, place, bundled_redis(), password="right")
    redis = ManagedProcess("redis", command, place / "redis.log")
    try:
        redis.wait_until(lambda: answers_ping(port, "right"), WAITED_S)
        url = {"REDIS_URL": f"redis://:wrong@127.0.0.1:{port}/0"}
        if who == RUN_API:
            return says_so(["grpo_api", "--port", str(free_port())], place, _PASSWORD, url)
        return ends([*server(ensure_tiny_model()), "--run-id", "wrong"], place, _PASSWORD, url)
    finally:
        redis.kill()


def server(model: Path) -> list[str]:
    return ["grpo_vllm", "--model", str(model), "--port", str(free_port())]


def another_server(site: Site, who: str, option: str) -> Outcome:
    """A plain file server of Python answers at the URL."""
    beside = Beside(site)
    port = free_port()
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    other = ManagedProcess("other", command, beside.place / "other.log")
    try:
        other.wait_until(lambda: "Serving" in other.log_text(), WAITED_S)
        return beside.ends(who, str(port), **{option: local(port)})
    finally:
        other.kill()


def no_such_name(site: Site, option: str) -> Outcome:
    nowhere = {option: "http://nowhere.invalid:8000"}
    return Beside(site).ends(ENVIRONMENT, "nowhere.invalid", **nowhere)


def damaged_append_only_file(site: Site) -> Outcome:
    """Of the Redis that run-api starts."""
    place = site.place()
    state = {"XDG_STATE_HOME": str(place)}
    words = ["grpo_api", "--port", str(free_port())]
    first = ManagedProcess("run-api", [sys.executable, "-m", *words], place / "first.log", state)
    first.wait_until(lambda: "run_api.listening" in first.log_path.read_text(), WAITED_S)
    first.stop()
    file = next(place.rglob("appendonly*"))
    file.write_bytes(b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n\x00damaged*3\r\n$3\r\nSET\r\n$1\r\n")
    return ends(words, place, "append only file", state)


def truncated_model(site: Site, who: str) -> Outcome:
    beside = Beside(site)
    model = beside.place / "model"
    shutil.copytree(ensure_tiny_model(), model)
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
    if who == TRAINER:
        return beside.ends(TRAINER, "model.safetensors", model=model)
    return ends([*server(model), "--redis-url", "none"], beside.place, "model.safetensors")


def little_memory(site: Site) -> Outcome:
    """vLLM measures the memory that is free. Its tracebacks come before ours."""
    flags = ("--redis-url", "none", "--gpu-memory-utilization", "0.999")
    says = "Available memory .* is less than desired"
    return ends([*server(ensure_tiny_model()), *flags], site.place(), says)


def full_log(site: Site) -> Outcome:
    """run-api answers although it cannot write its log."""
    beside = Beside(site)
    disk = beside.place / "logs"
    with ExitStack() as stack:
        stack.enter_context(host.small_disk(disk, "1m"))
        api = start_run_api(beside.redis_url, disk, run_id="full-log")
        stack.callback(api.process.kill)
        stack.enter_context(host.filled(disk))
        began = time.monotonic()
        for _ in range(20):
            httpx.post(f"{api.url}/register", json={})  # each is logged
        assert is_healthy(api.url)
        return Outcome("run-api goes on", "", time.monotonic() - began)


Inject = Callable[[Site], Outcome]


def faults() -> Iterator[Fault]:
    for kind, name, injected, inject in _rows():
        limit_s = LIMIT_S + (LOAD_S if name.startswith(SERVER) else 0.0)
        yield Fault(kind, name, injected, inject, mode=SHARED, limit_s=limit_s)


def _rows() -> Iterator[tuple[Kind, str, str, Inject]]:
    token = "run-api with another RUN_API_TOKEN"
    for who in (ENVIRONMENT, TRAINER):
        inject = partial(wrong_token, who=who)
        yield Kind.CREDENTIALS, f"{who}: wrong access token", token, inject
    for certificate, says in (
        (Certificate("self-signed"), "(?i)certificate"),
        (Certificate("expired", is_trusted=True, days=-1), "(?i)expired"),
        (Certificate("of another host", is_trusted=True, host="10.9.8.7"), "(?i)certificate|IP"),
    ):
        inject = partial(wrong_certificate, certificate=certificate, says=says)
        injected = "a TLS relay before run-api, with this certificate"
        yield Kind.CREDENTIALS, f"certificate is {certificate.what}", injected, inject
    yield Kind.CREDENTIALS, "https:// for a server without TLS", "run-api itself", plain_for_tls
    for who in (RUN_API, SERVER):
        inject = partial(wrong_password, who=who)
        yield Kind.CREDENTIALS, f"{who}: wrong password of Redis", "Redis with another", inject
    for who, option, name in (
        (ENVIRONMENT, "api", "--run-api-url"),
        (TRAINER, "api", "--run-api-url"),
        (ENVIRONMENT, "server", "--inference-url"),
    ):
        title, inject = (
            f"{who}: another server at {name}",
            partial(another_server, who=who, option=option),
        )
        yield Kind.VERSION, title, "`python -m http.server`", inject
    for who, option in ((RUN_API, "api"), (SERVER, "server")):
        title = f"environment: the name of {who} never resolves"
        yield Kind.NETWORK, title, "a name in .invalid", partial(no_such_name, option=option)
    file = "bytes written over Redis' append-only file"
    yield Kind.DISK, "append-only file is damaged", file, damaged_append_only_file
    for who in (TRAINER, SERVER):
        inject = partial(truncated_model, who=who)
        yield Kind.DISK, f"{who}: half of the model's file is missing", "truncate(2)", inject
    share = "--gpu-memory-utilization 0.999"
    yield Kind.MEMORY, "vllm-server: the host has too little memory", share, little_memory
    yield Kind.DISK, "run-api: the disk of its log is full", "tmpfs", full_log
