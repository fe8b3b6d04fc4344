"""Tasks: each supplies prompts and rewards the answers.

A task of your own is a function in a file (`def reward(answer, row)`) or a subclass of `Task`;
docs/how-to/own-reward.md shows both. These are the names that it needs.
"""

from grpo_env.failures import RolloutFailed as RolloutFailed
from grpo_env.tasks.rows import Row as Row
from grpo_env.tasks.rows import Split as Split
from grpo_env.tasks.rows import TaskOptions as TaskOptions
from grpo_env.tasks.task import Answer as Answer
from grpo_env.tasks.task import ContextFull as ContextFull
from grpo_env.tasks.task import Dialogue as Dialogue
from grpo_env.tasks.task import Graded as Graded
from grpo_env.tasks.task import MessagesUnusable as MessagesUnusable
from grpo_env.tasks.task import Reward as Reward
from grpo_env.tasks.task import State as State
from grpo_env.tasks.task import Task as Task
from grpo_env.tasks.tool_calls import Message as Message
