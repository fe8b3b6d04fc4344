"""Checks what groups show by themselves: end tokens, versions and scores.

One group proves little about scores, so each environment's recent batches are counted together.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checks.findings import CheckName, Finding
from grpo_trainer.data.groups import UsableSequence

WINDOW_BATCHES = 16
MIN_INCONSISTENT = 3
"""Groups with equal completions and different scores, at least. A rare one may be a slow grader's
time-out."""
INCONSISTENT_SHARE = 0.05
MIN_UNFINISHED = 16
UNFINISHED_SHARE = 0.05
"""Share of the unfinished completions with the best score of their batch, at least."""
MIN_EQUAL_GROUPS = 32
MIN_COMPARED, SEVERAL_SCORES = 112, 3
"""Fewer groups prove as much if they have several scores and many completions (16 groups of 8): a
grader that tells so many answers apart would do so within some group."""
RECORDS, MIN_AHEAD = 8, 5
"""Served versions that run-api recorded, and of the newest ones those that completions were ahead
of. Redis can learn of a version late, which looks the same, but seldom of 5 of 8 versions: if it is
late for 1 of 100, with a probability of 56e-10."""
FIRST_BATCHES = 3
"""In so many batches, at least two completions should have different scores."""


Counts = Counter[str]
"""Of one environment's groups, by name:

repeating: groups in which a completion occurs twice
inconsistent: those of them in which equal completions have different scores
varied: groups with different completions
compared: their completions, less one for each group
unfinished: completions that reached the token limit without an end token
unfinished_best: those of them with the best score of the batch
finished: completions that end with an end token
"""


Records = dict[PolicyVersion, bool]
"""By the version that was served when run-api received completions, as Redis had learned it:
whether some of them state a newer one."""


@dataclass(frozen=True)
class _Seen:
    """What a batch shows. `equal`: the score of each varied group in which all completions have
    the same one."""

    counts: Counts
    equal: list[float]


@dataclass
class _Beginning:
    """The first batches of an environment, while all their completions have one score."""

    batches: int = 0
    completions: int = 0
    scores: set[float] = field(default_factory=set)

    def has_ended(self, scores: Sequence[float]) -> bool:
        """Count a batch; whether it is the last one of a beginning with one score."""
        if self.batches >= FIRST_BATCHES or not scores:
            return False
        self.batches += 1
        self.completions += len(scores)
        self.scores.update(scores)
        return self.batches == FIRST_BATCHES and len(self.scores) == 1 < self.completions


class GroupCheck:
    """Args:
    end_tokens: token ids that end a completion
    uses_scores: False if the advantages come from a teacher alone
    """

    def __init__(self, end_tokens: frozenset[int], uses_scores: bool = True) -> None:
        self._end_tokens = end_tokens
        self._uses_scores = uses_scores
        self._recent: defaultdict[int | None, deque[_Seen]] = defaultdict(
            lambda: deque(maxlen=WINDOW_BATCHES)
        )
        self._beginnings: defaultdict[int | None, _Beginning] = defaultdict(_Beginning)
        self._records: defaultdict[int | None, Records] = defaultdict(dict)

    def findings(
        self, sequences: Sequence[UsableSequence], current: PolicyVersion
    ) -> Iterator[Finding]:
        """Check the groups of a batch. Args: current: version of the trainer's weights"""
        by_env: defaultdict[int | None, list[UsableSequence]] = defaultdict(list)
        for sequence in sequences:
            by_env[sequence.group.env_id].append(sequence)
        for env_id, mine in by_env.items():
            yield from self._of_masks(env_id, mine)
            yield from _of_versions(env_id, mine, current, self._records[env_id])
            # Advantages from the environment need no scores.
            groups = [sequence.group for sequence in mine if sequence.index == 0]
            scored = [group for group in groups if self._uses_scores and not group.advantages]
            scores = [score for group in scored for score in group.scores]
            best = max(scores, default=0.0) if len(set(scores)) > 1 else None
            recent = self._recent[env_id]
            recent.append(self._seen(scored, best))
            yield from _of_scores(env_id, sum((seen.counts for seen in recent), Counts()))
            yield from _of_equal_scores(env_id, recent)
            if self._beginnings[env_id].has_ended(scores):
                yield _of_beginning(env_id, self._beginnings[env_id])

    def _of_masks(
        self, env_id: int | None, sequences: Iterable[UsableSequence]
    ) -> Iterator[Finding]:
        last = [
            sequence.trained[-2:]
            for sequence in sequences
            if len(sequence.tokens) > 1 and sequence.tokens[-1] in self._end_tokens
        ]
        masked = last.count([True, False])
        if masked and not any(is_trained for _, is_trained in last):
            yield Finding(
                CheckName.END_TOKEN_MASKED,
                env_id,
                f"all {masked} end tokens are masked, so the policy does not learn when to stop",
                "in the environment, set the mask of a sampled end token to the token itself",
            )

    def _seen(self, groups: Iterable[ScoredGroup], best: float | None) -> _Seen:
        """Count over groups. Args: best: the best score of their batch; None if all are equal"""
        counts, equal = Counts(), list[float]()
        for group in groups:
            found = self._counts(group, best)
            counts += found
            scores = set(group.scores)
            if found["varied"] and len(scores) == 1:
                equal += scores
        return _Seen(counts, equal)

    def _counts(self, group: ScoredGroup, best: float | None) -> Counts:
        # A score is that of a whole rollout: one of its sequences may be that of another rollout.
        rollouts: defaultdict[int, list[int]] = defaultdict(list)
        for sequence, rollout in enumerate(group.rollouts):
            rollouts[rollout].append(sequence)
        scores: defaultdict[tuple[tuple[int, ...], ...], set[float]] = defaultdict(set)
        for sequences in rollouts.values():
            tokens = tuple(tuple(group.tokens[sequence]) for sequence in sequences)
            scores[tokens].update(group.scores[sequence] for sequence in sequences)
        limit = (group.generation_params or {}).get("max_tokens")
        ends = [self._ending(*rows, limit) for rows in zip(group.tokens, group.masks, strict=True)]
        return Counter(
            repeating=len(scores) < len(rollouts),
            inconsistent=any(len(found) > 1 for found in scores.values()),
            varied=len(scores) > 1,
            compared=(len(group.scores) - 1) * (len(scores) > 1),
            unfinished=ends.count(False),
            unfinished_best=sum(
                end is False and score == best
                for end, score in zip(ends, group.scores, strict=True)
            ),
            finished=ends.count(True),
        )

    def _ending(self, tokens: list[int], masks: list[int], limit: object) -> bool | None:
        """Whether the last turn ends with an end token; None if it may have ended in another
        way."""
        last = len(masks) - 1
        while last and masks[last] == MASKED:
            last -= 1
        if tokens[last] in self._end_tokens:
            return True
        first = last
        while first and masks[first - 1] != MASKED:
            first -= 1
        is_full = isinstance(limit, int) and last - first + 1 >= limit
        return False if is_full and self._end_tokens else None


def _of_versions(
    env_id: int | None,
    sequences: Iterable[UsableSequence],
    current: PolicyVersion,
    records: Records,
) -> Iterator[Finding]:
    """Certain of versions that the trainer has not published yet. Args: records: is updated"""
    ahead = Counter[tuple[PolicyVersion, PolicyVersion]]()
    for sequence in sequences:
        if sequence.versions is None:
            continue
        last, served = sequence.versions[1], sequence.received_under or current
        ahead[last, min(served, current)] += last > min(served, current)
        records[served] = records.get(served, False) or last > served
    for version in sorted(records)[:-RECORDS]:
        del records[version]
    last, newest = max(ahead, default=(current, current))
    if last > current or sum(records.values()) >= MIN_AHEAD:
        yield Finding(
            CheckName.VERSION_AHEAD,
            env_id,
            f"{ahead.total()} completions state a policy version that did not exist yet, for "
            f"example {tuple(last)} when {tuple(newest)} was served",
            "let the environment send the version of the server's response, which sampled the "
            "tokens, and not a version that it requests later. If the server's log has the event "
            "served_version.save_delayed several times, Redis answers too late",
        )


def _of_scores(env_id: int | None, seen: Counts) -> Iterator[Finding]:
    inconsistent, repeating = seen["inconsistent"], seen["repeating"]
    best, unfinished = seen["unfinished_best"], seen["unfinished"]
    if inconsistent >= max(MIN_INCONSISTENT, INCONSISTENT_SHARE * repeating):
        yield Finding(
            CheckName.INCONSISTENT_SCORES,
            env_id,
            f"in {inconsistent} of {repeating} groups, equal completions have different scores",
            "check whether the environment scores a failed or NaN reward as a number, or assigns "
            "scores to the wrong completions. A grader that is random on purpose needs no change",
        )
    if seen["finished"] and best >= max(MIN_UNFINISHED, UNFINISHED_SHARE * unfinished):
        yield Finding(
            CheckName.UNFINISHED_SCORED,
            env_id,
            f"{best} of {unfinished} completions that reached the token limit without an end "
            "token have the best score, as if they were finished",
            "lower the score of completions with finish reason length, or raise the token limit",
        )


def _of_equal_scores(env_id: int | None, recent: Sequence[_Seen]) -> Iterator[Finding]:
    """Judges the newest groups alone: a fault may follow many honest ones."""
    varied, compared, equal = 0, 0, list[float]()
    for seen in reversed(recent):
        varied += seen.counts["varied"]
        compared += seen.counts["compared"]
        equal += seen.equal
        if len(equal) < varied:
            return
        has_several = len(set(equal)) >= SEVERAL_SCORES
        if varied >= MIN_EQUAL_GROUPS or (has_several and compared >= MIN_COMPARED):
            yield Finding(
                CheckName.EQUAL_SCORES,
                env_id,
                f"in the last {varied} groups, different completions have equal scores",
                "check whether the environment gives a group's score to each of its completions. "
                "If the scores are right, the prompts are too easy or too hard, or the reward does "
                "not tell these completions apart",
            )
            return


def _of_beginning(env_id: int | None, seen: _Beginning) -> Finding:
    [score] = seen.scores
    return Finding(
        CheckName.EQUAL_SCORES,
        env_id,
        f"all {seen.completions} completions of the first {seen.batches} batches score {score:g}",
        "try the reward with `env-server check`: does it find the answer where the model writes "
        "it, and does the row hold the right answer in the form that the reward compares? If the "
        "scores are right, the prompts are too easy or too hard for this model",
    )
