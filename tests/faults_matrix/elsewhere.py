"""Faults that other tests inject, and those that need hardware which nobody ran."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults_matrix.declared import Fault, Kind
from tests.faults_matrix.whole_run import GOES_ON

_KILLS = "tests/faults/test_killed_processes.py"
_KILL = f"{_KILLS}::test_the_run_goes_on_after_a_kill"
_NEVER_BACK = f"{_KILLS}::test_a_process_that_does_not_come_back_is_named"
_REDIS = "tests/integration/test_run_api_redis_troubles.py"
_WORKERS = "tests/integration/test_reward_workers.py"
_BODIES = "tests/integration/test_run_api_bodies.py"
_BAD_INPUT = "tests/integration/test_run_api_bad_input.py"
_STATE = "tests/unit/trainer/checkpoint/test_state.py"
_FOLLOWER = "tests/unit/vllm/test_follower.py"
_SUPERVISOR = "tests/unit/vllm/test_supervisor.py"

Row = tuple[Kind, str, str, str, str, str]
"""Kind, fault, injected by, what happens, logged, test."""

_KILLED: tuple[Row, ...] = tuple(
    (Kind.PROCESS, f"{what} killed, {when}", "SIGKILL", GOES_ON, logged, f"{_KILL}[{test}]")
    for what, when, logged, test in (
        ("run-api", "while the trainer trains", "", "shared_vllm-run-api-training"),
        ("redis", "while the trainer trains", "request.failed", "shared_vllm-redis-training"),
        ("redis and run-api", "before an acknowledgement", "", "shared_vllm-redis+run-api-saved"),
        ("environment", "between two steps", "", "shared_vllm-environment-waiting"),
        (
            "vllm-server",
            "half of the weights written",
            "server.connection_lost",
            "shared_vllm-vllm-server-half-written",
        ),
        ("engine", "while the trainer trains", "", "shared_vllm-engine-training"),
        ("engine", "`lora_only`", "", "lora_only-engine-waiting"),
        ("supervisor", "`lora_restart`", "", "lora_restart-supervisor-training"),
        ("redis", "`none`", "", "none-redis-training"),
        ("trainer", "before an acknowledgement", "", "shared_vllm-trainer-saved"),
        ("trainer", "`lora_only`", "", "lora_only-trainer-training"),
    )
)
_GONE: tuple[Row, ...] = tuple(
    (Kind.PROCESS, what, "its end", happens, error, test)
    for what, happens, error, test in (
        (
            "run-api is not started again",
            "trainer and environment end",
            "`ServiceUnavailable`",
            f"{_NEVER_BACK}[run-api]",
        ),
        (
            "redis is not started again",
            "the trainer ends",
            "`ServiceUnavailable`",
            f"{_NEVER_BACK}[redis]",
        ),
        (
            "environment is not started again",
            "the trainer ends, if `--batch-deadline-s` is the shortest deadline",
            "`ServiceUnavailable`",
            f"{_NEVER_BACK}[environment]",
        ),
        (
            "vllm-server is not started again",
            "trainer and environment end",
            "`LostServer`, `ServiceUnavailable`",
            f"{_NEVER_BACK}[vllm-server]",
        ),
        (
            "trainer is not started again",
            "the environment ends",
            "`NoTrainer`",
            f"{_NEVER_BACK}[trainer]",
        ),
        (
            "one of several ranks is killed",
            "the others end",
            "`LostRank`",
            "tests/unit/trainer/ranks/test_heartbeat.py::test_a_rank_ends_if_another_one_is_lost[killed]",
        ),
        (
            "a process of a local run is killed",
            "all others end; the terminal shows the end of its log, errors first",
            "`ProcessFailed`",
            "tests/unit/runs/process/test_stack.py::"
            "test_the_death_of_an_earlier_service_ends_the_wait_for_a_later_one",
        ),
        (
            "a reward ends its process",
            "that answer alone has failed",
            "`ProcessEnded`",
            f"{_WORKERS}::test_an_error_is_that_of_its_answer_alone[crash-ProcessEnded-the reward "
            "ended its process with status 4]",
        ),
        (
            "an engine fails again and again",
            "the server answers 503 with the reason",
            "",
            f"{_SUPERVISOR}::test_engines_that_keep_failing_are_given_up_until_new_weights_are_announced",
        ),
    )
)
_OTHERS: tuple[Row, ...] = (
    (
        Kind.PROCESS,
        "redis fails over to a replica",
        "REPLICAOF of two real servers",
        "run-api finds the new primary",
        "",
        "tests/integration/test_redis_failover.py::test_run_api_finds_the_new_primary",
    ),
    (
        Kind.NETWORK,
        "a client of run-api sends its body too slowly",
        "a socket",
        "status 408",
        "",
        f"{_BODIES}::test_a_body_that_trickles_is_408_all_the_same",
    ),
    (
        Kind.DISK,
        "redis: the disk is full, then has room",
        "tmpfs of 4 MiB",
        "`LocalRedis` starts it again, nothing acknowledged is lost",
        "",
        f"{_REDIS}::test_redis_goes_on_once_a_full_disk_has_room",
    ),
    (
        Kind.DISK,
        "redis cannot write its snapshot",
        "a directory in the way",
        "status 503 with the reason",
        "`StoreUnavailable`",
        f"{_REDIS}::test_submissions_are_503_and_nothing_is_queued[fail_to_snapshot-MISCONF]",
    ),
    (
        Kind.DISK,
        "a bit of a checkpoint has changed",
        "written over",
        "the trainer ends at its start",
        "`DamagedState`",
        f"{_STATE}::test_a_damaged_state_is_named[tensors.safetensors-flip_a_bit-the content of "
        "tensors.safetensors has changed]",
    ),
    (
        Kind.DISK,
        "no room for weights that a server fetches",
        "a full directory",
        "named; fetched when there is room",
        "",
        f"{_FOLLOWER}::test_a_full_staging_directory_is_named_and_room_is_used_later",
    ),
    (
        Kind.MEMORY,
        "redis: maxmemory is reached",
        "CONFIG SET maxmemory",
        "status 503 with the reason; batches are still handed out",
        "`StoreUnavailable`",
        f"{_REDIS}::test_submissions_are_503_and_nothing_is_queued[fill_at_once-OOM]",
    ),
    (
        Kind.BYTES,
        "run-api receives bytes that are no HTTP",
        "a socket",
        "status 400, the connection is closed",
        "",
        f"{_BAD_INPUT}::test_bytes_that_are_not_http_are_400_and_the_connection_closed",
    ),
    (
        Kind.BYTES,
        "run-api receives damaged gzip",
        "a request",
        "status 422",
        "",
        f"{_BAD_INPUT}::test_gzip_is_read_if_it_is_whole_and_within_the_limit",
    ),
    (
        Kind.BYTES,
        "a server fetches weights with a wrong digest",
        "damaged files",
        "fetched whole, or from another source",
        "",
        f"{_FOLLOWER}::test_a_delta_with_a_wrong_digest_is_replaced_by_the_full_file",
    ),
    (
        Kind.VERSION,
        "redis of the host may delete keys",
        "maxmemory-policy volatile-lru",
        "run-api ends at its start",
        "`UnsuitableRedis`",
        f"{_REDIS}::test_a_redis_that_may_delete_keys_is_refused_by_its_setting",
    ),
    (
        Kind.VERSION,
        "the server loaded another data type",
        "--dtype",
        "the trainer ends at its start",
        "`PolicyMismatch`",
        "tests/unit/trainer/weight_sync/test_file_sync.py::"
        "test_a_server_of_another_data_type_is_refused_at_the_start",
    ),
)
_NOT_RUN = (
    ("an ECC error that cannot be corrected (Xid 48)", "nvidia-smi, error injection"),
    ("a GPU falls off the bus (Xid 79)", "PCI hot reset"),
    ("a GPU has no memory left while another process takes it", "a process that allocates"),
    ("a partner of NCCL is silent", "SIGSTOP of a rank on another GPU"),
    ("the driver and CUDA do not match", "an image with another CUDA"),
)


def faults() -> Iterator[Fault]:
    for kind, name, injected, happens, error, test in (*_KILLED, *_GONE, *_OTHERS):
        yield Fault(kind, name, injected, tests=(test,), happens=happens, error=error)
    for name, injected in _NOT_RUN:
        yield Fault(Kind.GPU, name, injected, happens="not run: needs a GPU of its own")
