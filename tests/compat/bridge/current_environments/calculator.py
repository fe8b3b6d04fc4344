"""Sums with a calculator, as a user of verifiers from 0.4 writes it."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    calculator: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class CalculatorTaskset(vf.Taskset[SumTask, CalculatorConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"What is {a}+{b}?", answer=str(a + b)), self.config.task)
            for a in range(3)
            for b in range(3)
        ]

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [Calculator(config.calculator)]


__all__ = ["CalculatorTaskset"]

if __name__ == "__main__":
    Calculator.run()
