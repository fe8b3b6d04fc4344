"""A run-api whose trainer takes every batch the moment it is complete."""

from __future__ import annotations

from typing import Any

from tests.unit.env.http_stub import Answer, Route


class RunApi:
    """Batches of 4 sequences; a step is delivered as soon as two groups are queued."""

    def __init__(self, num_steps: int = 3, polls_before_trainer: int = 0) -> None:
        self.num_steps = num_steps
        self.waits = polls_before_trainer
        self.groups: list[dict[str, Any]] = []
        self.disconnected: list[int] = []
        self.takes_batches = True
        self.steps_before = 0
        self.prolonged_to: int | None = None
        self.status_polls = 0

    def routes(self) -> dict[str, Route]:
        return {
            "POST /register-env": self.register,
            "GET /info": lambda _body: (200, {"batch_size": 4, "max_token_len": 50}),
            "GET /status-env": self.status,
            "POST /scored_data": self.submit,
            "POST /disconnect-env": self.disconnect,
        }

    def register(self, body: dict[str, Any]) -> Answer:
        self.waits -= 1
        if self.waits >= 0:
            return 200, {"status": "wait for trainer to start"}
        answer = {"status": "success", "env_id": 0}
        answer |= {"starting_step": self.steps_before}
        return 200, answer | {"wandb_name": body["desired_name"], "num_steps": self.num_steps}

    def status(self, _body: dict[str, Any]) -> Answer:
        self.status_polls += 1
        step, queue = divmod(len(self.groups), 2) if self.takes_batches else (0, len(self.groups))
        told = {} if self.prolonged_to is None else {"num_steps": self.prolonged_to}
        sizes = {"queue_size": queue, "self_queue_size": queue, "max_group_size": 2}
        weights = {"unallocated_fraction": 1.0, "env_weight": 1.0}
        return 200, {"current_step": self.steps_before + step, **sizes, **weights, **told}

    def submit(self, body: dict[str, Any]) -> Answer:
        self.groups.append(body)
        return 200, {"status": "received"}

    def disconnect(self, body: dict[str, Any]) -> Answer:
        self.disconnected.append(body["env_id"])
        return 200, {"status": "success"}
