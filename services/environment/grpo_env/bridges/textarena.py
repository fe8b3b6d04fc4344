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
        return [*self._opening(), *self._made(row[SEED]).read()]

    @asynccontextmanager
    async def episode(self, row: Row) -> AsyncIterator[_Game]:
        yield self._made(row[SEED])

    def _made(self, seed: int) -> _Game:
        try:
            game, part = dict(self.arguments["game"]), str(self.arguments["action"])
            return _Game(self.name, game, seed, part)
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


class _Game:
    """See `episodes.Episode`. A game with its own random numbers: TextArena draws from those of the
    process.

    Its wrappers of actions stay, such as the one that adds missing brackets. Those of observations
    repeat the whole game in each turn, which the conversation already holds.

    Raises:
        ValueError: there is no such game, or it has several players.
        TypeError: it has no such argument.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, name: str, arguments: Mapping[str, Any], seed: int, part: str) -> None:
        import textarena

        self._part = part
        self._facts: Mapping[str, Any] = {}
        self._random = random.Random(seed).getstate()
        self._wrappers = []
        with self._own_numbers():
            found = textarena.make(name, **arguments)
            while isinstance(found, textarena.Wrapper):
                if isinstance(found, textarena.ActionWrapper):
                    self._wrappers.append(found)
                found = found.env
            self._game = found
            self._game.reset(num_players=1, seed=seed)

    def read(self) -> list[Message]:
        """What the game said since it was last read, without what the player said."""
        with self._own_numbers():
            _, new = self._game.get_observation()
        said = [str(text) for sender, text, _ in new if sender != _PLAYER]
        return [{"role": "user", "content": "\n".join(said).strip()}]

    async def reset(self) -> Observation:
        return Observation(self.read())

    async def act(self, answer: Answer) -> Observation:
        action = action_text(answer, self._part)
        for wrapper in self._wrappers:
            action = wrapper.action(action)
        with self._own_numbers():
            done, _ = self._game.step(action)
        if not done:
            return Observation(self.read())
        rewards, facts = self._game.close()
        self._facts = facts[_PLAYER]
        reason = str(self._facts.get("reason", ""))
        return Observation(self.read(), float(rewards[_PLAYER]), True, reason)

    async def result(self) -> Result:
        return Result({"invalid_move": float(bool(self._facts.get("invalid_move")))})

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)
