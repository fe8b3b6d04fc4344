"""A reward for the rows of sums.jsonl: 1 for the right number, and a little for any number."""


def reward(answer, row):
    text = answer.strip()
    return {"accuracy": float(text == row["answer"]), "number": 0.1 * text.isdigit()}
