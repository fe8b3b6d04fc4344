"""One-digit sums, as a user of verifiers from 0.4 writes it."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 3)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        numbers = range(self.config.largest + 1)
        return [
            SumTask(
                SumData(
                    prompt=f"{a}+{b}=", system_prompt="Answer with the number.", answer=str(a + b)
                ),
                self.config.task,
            )
            for a in numbers
            for b in numbers
        ]


__all__ = ["SumsTaskset"]
