"""An environment of OpenEnv: guess a digit, with hints. It serves two sessions at a time.

-1 raises an error, and -2 ends the server.
"""

import os
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    digit: int


class Hint(Observation):
    hint: str


class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.secret = 0

    def reset(self, seed: int | None = None, **_: Any) -> Hint:
        self.secret = (seed or 0) % 10
        self._state = State(step_count=0)
        return Hint(hint="Guess a digit.")

    def step(self, action: Guess, **_: Any) -> Hint:  # type: ignore[override]
        self._state.step_count += 1
        if action.digit == -1:
            raise ValueError("digits are not negative")
        if action.digit == -2:
            os._exit(3)
        if action.digit == self.secret:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if self.secret > action.digit else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Digits, Guess, Hint, env_name="digits", max_concurrent_envs=2)
