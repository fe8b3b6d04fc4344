"""Faults that stay: a command ends with a named error, beside the services of a whole run."""

from __future__ import annotations

import os
import re
import shutil
import socket
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
from tests.whole_run.matrix.declared import LIMIT_S, LOAD_S, Fault, Kind, Outcome, Site
from tests.whole_run.matrix.relay import Damage, relay
from tests.whole_run.matrix.whole_run import ERROR, WAITED_S

WHEN_WRONG = {"RUN_API_TOKEN": "wrong"}
NAMES = {
    "grpo_env": ENVIRONMENT,
    "grpo_trainer": TRAINER,
    "grpo_api": RUN_API,
    "grpo_vllm": SERVER,
}
"""Of packages."""
_PASSWORD = "invalid username-password pair"
SOON = ("--run-api-deadline-s", "5", "--start-deadline-s", "5")


def answers(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def environment(run_api: str, inference: str) -> list[str]:
    urls = ("--run-api-url", run_api, "--inference-url", inference)
    model = ("--model", str(ensure_tiny_model()))
    return ["grpo_env", "arithmetic", "serve", *urls, *model, "--group-size", "4", *SOON]


def trainer(run_api: str, inference: str, save: Path, model: Path | None = None) -> list[str]:
    urls = ("--run-api-url", run_api, "--inference-url", inference)
    of = ("--model", str(model or ensure_tiny_model()), "--save-path", str(save))
    return ["grpo_trainer", *urls, *of, "--mode", SHARED, "--service-deadline-s", "5"]


def ends(
    words: list[str], place: Path, says: str, variables: dict[str, str] | None = None
) -> Outcome:
    """Run a command until it ends. It must name its error, and say these words (a pattern)."""
    return ends_with([sys.executable, "-m", *words], words[0], place, says, variables)


def ends_with(
    command: list[str], name: str, place: Path, says: str, variables: dict[str, str] | None = None
) -> Outcome:
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(variables or {})}
    began = time.monotonic()
    process = ManagedProcess(name, command, place / "log", settings)
    with suppress(ProcessFailed):
        process.wait(WAITED_S)
    code, seconds = process.exit_code, time.monotonic() - began
    process.kill()
    log = process.log_path.read_text()
    assert code, f"{name} did not end with an error in time:\n{log[-4000:]}"
    assert re.search(says, log), f"{name} does not say {says!r}:\n{log[-4000:]}"
    named = ERROR.findall(log.rpartition("Traceback")[2])
    assert named, f"{name} ended without a named error:\n{log[-4000:]}"
    error = named[-1]
    return Outcome(f"{NAMES[name]} ends", f"`{error}`", seconds)


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
    run, place = site.run(SHARED), site.place()
    redis_url = f"redis://127.0.0.1:{run.rig.port(REDIS)}/0"
    api = start_run_api(redis_url, place, environment={"RUN_API_TOKEN": "right"})
    try:
        server = local(run.rig.port(SERVER))
        if who == "environment":
            return ends(environment(api.url, server), place, "401", WHEN_WRONG)
        with run.without_trainer():
            return ends(trainer(api.url, server, place / "save"), place, "401", WHEN_WRONG)
    finally:
        api.process.kill()


def wrong_certificate(site: Site, certificate: Certificate, says: str) -> Outcome:
    run, place = site.run(SHARED), site.place()
    tls, trusted = tls_context(certificate, place)
    with relay(run.rig.port(RUN_API), Damage(), tls) as port:
        words = environment(f"https://127.0.0.1:{port}", local(run.rig.port(SERVER)))
        return ends(words, place, says, {"SSL_CERT_FILE": str(trusted)})


def plain_for_tls(site: Site) -> Outcome:
    run, place = site.run(SHARED), site.place()
    url = f"https://127.0.0.1:{run.rig.port(RUN_API)}"
    return ends(environment(url, local(run.rig.port(SERVER))), place, "(?i)ssl|tls")


def wrong_password(site: Site, who: str) -> Outcome:
    place = site.place()
    port = free_port()
    command = redis_command(port, place, bundled_redis(), password="right")
    redis = ManagedProcess("redis", command, place / "redis.log")
    try:
        redis.wait_until(lambda: answers_ping(port, "right"), WAITED_S)
        url = {"REDIS_URL": f"redis://:wrong@127.0.0.1:{port}/0"}
        if who == "run-api":
            return says_so(["grpo_api", "--port", str(free_port())], place, _PASSWORD, url)
        model = ("--model", str(ensure_tiny_model()))
        words = ["grpo_vllm", *model, "--port", str(free_port()), "--run-id", "wrong"]
        return ends(words, place, _PASSWORD, url)
    finally:
        redis.kill()


def another_server(site: Site, who: str) -> Outcome:
    """A plain file server of Python answers at the URL."""
    run, place = site.run(SHARED), site.place()
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    other = ManagedProcess("other", command, place / "other.log")
    try:
        other.wait_until(lambda: answers(port), WAITED_S)
        server, api = local(run.rig.port(SERVER)), local(run.rig.port(RUN_API))
        if who == "trainer":
            with run.without_trainer():
                return ends(trainer(local(port), server, place / "save"), place, str(port))
        urls = (local(port), server) if who == "run-api" else (api, local(port))
        return ends(environment(*urls), place, str(port))
    finally:
        other.kill()


def no_such_name(site: Site, who: str) -> Outcome:
    run, place = site.run(SHARED), site.place()
    server, api = local(run.rig.port(SERVER)), local(run.rig.port(RUN_API))
    nowhere = "http://nowhere.invalid:8000"
    words = environment(nowhere, server) if who == "run-api" else environment(api, nowhere)
    return ends(words, place, "nowhere.invalid")


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
    run, place = site.run(SHARED), site.place()
    model = place / "model"
    shutil.copytree(ensure_tiny_model(), model)
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
    if who == "trainer":
        api, server = local(run.rig.port(RUN_API)), local(run.rig.port(SERVER))
        with run.without_trainer():
            return ends(trainer(api, server, place / "save", model), place, "model.safetensors")
    words = ["grpo_vllm", "--model", str(model), "--port", str(free_port()), "--redis-url", "none"]
    return ends(words, place, "model.safetensors")


def little_memory(site: Site) -> Outcome:
    """vLLM measures the memory that is free. Its tracebacks come before ours."""
    words = ["grpo_vllm", "--model", str(ensure_tiny_model()), "--port", str(free_port())]
    return ends(
        [*words, "--redis-url", "none", "--gpu-memory-utilization", "0.999"],
        site.place(),
        "Available memory .* is less than desired",
    )


def full_log(site: Site) -> Outcome:
    """run-api answers although it cannot write its log."""
    run, place = site.run(SHARED), site.place()
    disk = place / "logs"
    with ExitStack() as stack:
        stack.enter_context(host.small_disk(disk, "1m"))
        redis_url = f"redis://127.0.0.1:{run.rig.port(REDIS)}/0"
        api = start_run_api(redis_url, disk, run_id="full-log")
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
    for who in ("environment", "trainer"):
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
    for who in ("run-api", "vllm-server"):
        inject = partial(wrong_password, who=who)
        yield Kind.CREDENTIALS, f"{who}: wrong password of Redis", "Redis with another", inject
    for who, title in (
        ("run-api", "environment: another server at --run-api-url"),
        ("trainer", "trainer: another server at --run-api-url"),
        ("vllm-server", "environment: another server at --inference-url"),
    ):
        yield Kind.VERSION, title, "`python -m http.server`", partial(another_server, who=who)
    for who in ("run-api", "vllm-server"):
        title = f"environment: the name of {who} never resolves"
        yield Kind.NETWORK, title, "a name in .invalid", partial(no_such_name, who=who)
    file = "bytes written over Redis' append-only file"
    yield Kind.DISK, "append-only file is damaged", file, damaged_append_only_file
    for who in ("trainer", "vllm-server"):
        inject = partial(truncated_model, who=who)
        yield Kind.DISK, f"{who}: half of the model's file is missing", "truncate(2)", inject
    share = "--gpu-memory-utilization 0.999"
    yield Kind.MEMORY, "vllm-server: the host has too little memory", share, little_memory
    yield Kind.DISK, "run-api: the disk of its log is full", "tmpfs", full_log
