"""One-word answers: a pretrained model knows the capitals, and learns to say nothing else."""


def reward(answer, row):
    """1 for the right word alone; 0.2 for the right word within a sentence, 0.1 for any word."""
    words = answer.strip().rstrip(".").split()
    return {
        "accuracy": float(words == [row["answer"]]),
        "named": 0.2 * (row["answer"] in answer),
        "one_word": 0.1 * (len(words) == 1 and answer.finished),
    }
