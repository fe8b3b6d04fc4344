"""Games of TextArena for one player as tasks. https://github.com/LeonGuertler/TextArena"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from grpo_env.bridges import EnvironmentUnusable, refuse_options
from grpo_env.bridges.episodes import SEED, EpisodeTask, Observation, Result, action_text
from grpo_env.tasks import Answer, Message, Row, TaskOptions

_PLAYER = 0


class TextArenaTask(EpisodeTask):
    """Plays a game of TextArena: the policy is its only player.

    The score is the reward at the end of the game; a game that does not end scores 0.

    Raises:
        EnvironmentUnusable: TextArena is not installed, or the game cannot be played.
    """

    defaults: Mapping[str, Any] = {**EpisodeTask.defaults, "game": {}}

    def __init__(self, game: str, options: TaskOptions) -> None:
        refuse_options(game, options, "data", "data_config", "eval_data", "columns")
        super().__init__(game, options)
        self._made(int(self.arguments["first_seed"]))

    def prompt(self, row: Row) -> list[Message]:
        """What the player reads first."""
        return [*self._opening(), *_messages(self._made(row[SEED]))]

    @asynccontextmanager
    async def episode(self, row: Row) -> AsyncIterator[_Game]:
        yield _Game(self._made(row[SEED]), str(self.arguments["action"]))

    def _made(self, seed: int) -> _Played:
        try:
            return _Played(self.name, dict(self.arguments["game"]), seed)
        except ImportError as error:
            raise EnvironmentUnusable(
                f"the game {self.name} needs the module {error.name or error}, which is not "
                "installed beside env-server: pip install --no-deps -r requirements/textarena.txt"
            ) from error
        except LookupError as error:  # of nltk
            lines = [line.strip() for line in str(error).splitlines()]
            advice = next((line for line in lines if "download(" in line), "").strip("> ")
            raise EnvironmentUnusable(
                f"the game {self.name} needs data that is not on this machine: {advice or error}"
            ) from error
        except (ValueError, TypeError, AssertionError) as error:
            raise EnvironmentUnusable(f"the game {self.name} cannot be played: {error}") from error


class _Played:
    """A game with its own random numbers: TextArena draws from those of the process.

    Its wrappers of actions stay, such as the one that adds missing brackets. Those of observations
    repeat the whole game in each turn, which the conversation already holds.

    Raises:
        ValueError: there is no such game, or it has several players.
        TypeError: it has no such argument.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], seed: int) -> None:
        import textarena

        self._random = random.Random(seed).getstate()
        self._wrappers = []
        with self._own_numbers():
            found = textarena.make(name, **arguments)
            while isinstance(found, textarena.Wrapper):
                if isinstance(found, textarena.ActionWrapper):
                    self._wrappers.append(found)
                found = found.env
            self.game = found
            self.game.reset(num_players=1, seed=seed)

    def read(self) -> list[str]:
        """What the game said since it was last read, without what the player said."""
        with self._own_numbers():
            _, new = self.game.get_observation()
        return [str(text) for sender, text, _ in new if sender != _PLAYER]

    def play(self, action: str) -> bool:
        """Whether the game has ended."""
        for wrapper in self._wrappers:
            action = wrapper.action(action)
        with self._own_numbers():
            done, _ = self.game.step(action)
        return bool(done)

    def result(self) -> tuple[float, Mapping[str, Any]]:
        """The player's reward, and what the game says about it."""
        rewards, facts = self.game.close()
        return float(rewards[_PLAYER]), facts[_PLAYER]

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)


class _Game:
    """See `episodes.Episode`."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, played: _Played, part: str) -> None:
        self._played, self._part = played, part
        self._facts: Mapping[str, Any] = {}

    async def reset(self) -> Observation:
        return Observation(_messages(self._played))

    async def act(self, answer: Answer) -> Observation:
        if not self._played.play(action_text(answer, self._part)):
            return Observation(_messages(self._played))
        reward, self._facts = self._played.result()
        return Observation(
            _messages(self._played), reward, True, str(self._facts.get("reason", ""))
        )

    async def result(self) -> Result:
        return Result({"invalid_move": float(bool(self._facts.get("invalid_move")))})


def _messages(played: _Played) -> list[Message]:
    return [{"role": "user", "content": "\n".join(played.read()).strip()}]
