"""Two problems as the hub has them."""

from __future__ import annotations

from pathlib import Path

ROWS = [
    {"question": "How many eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"},
    {"question": "How much?", "answer": "A lot.\n#### 1,080,000"},
]

README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


def write_hub_layout(directory: Path) -> None:
    """As openai/gsm8k is laid out, with one configuration."""
    import pyarrow
    from pyarrow import parquet

    (directory / "main").mkdir(parents=True)
    (directory / "README.md").write_text(README)
    for split, rows in {"train": ROWS, "test": ROWS[:1]}.items():
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, directory / "main" / f"{split}-00000-of-00001.parquet")
