from __future__ import annotations

from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name + '\n' }}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HUB_ROWS = [
    {"question": "How many eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"},
    {"question": "How much?", "answer": "A lot.\n#### 1,080,000"},
]
HUB_README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer: one token per byte, then <|im_start|> = 256 and <|im_end|> = 257."""
    from transformers import PreTrainedTokenizerFast

    from tests.support.conversations import byte_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def hub_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory laid out like openai/gsm8k on the hub, with one configuration."""
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "gsm8k"
    (directory / "main").mkdir(parents=True)
    (directory / "README.md").write_text(HUB_README)
    for split, rows in {"train": HUB_ROWS, "test": HUB_ROWS[:1]}.items():
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, directory / "main" / f"{split}-00000-of-00001.parquet")
    return directory
