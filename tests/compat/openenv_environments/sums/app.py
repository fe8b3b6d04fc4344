"""An environment of OpenEnv whose actions are calls of tools."""

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

mcp = FastMCP("sums")


@mcp.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Sums(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(mcp)
        self._state = State()

    def reset(self, **_: Any) -> Observation:
        return Observation(metadata={"message": "ready"})

    async def step_async(self, action: Action, **how: Any) -> Observation:
        seen = await super().step_async(action, **how)
        if isinstance(seen, CallToolObservation):
            self._state.step_count += 1
            seen.reward = 0.5
        return seen

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise TypeError(action)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Sums, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=8)
