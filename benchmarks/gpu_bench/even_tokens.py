"""A reward that a model of random weights gets, so that its groups have different scores."""


def reward(answer, row):  # type: ignore[no-untyped-def]  # noqa: ARG001
    return sum(token % 2 == 0 for token in answer.token_ids) / max(1, len(answer.token_ids))
