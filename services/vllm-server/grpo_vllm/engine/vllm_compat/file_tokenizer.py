"""Loads the server's tokenizer as its tokenizer.json describes it, in place of vLLM's class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from vllm.tokenizers.hf import CachedHfTokenizer, get_cached_tokenizer

from grpo_core.weights.model_files import load_tokenizer


class FileTokenizer(CachedHfTokenizer):  # type: ignore[misc]
    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        **options: Any,
    ) -> Any:
        options |= {"revision": revision, "cache_dir": download_dir}
        loaded = load_tokenizer(
            str(path_or_repo_id), transformers, trust_remote_code=trust_remote_code, **options
        )
        return get_cached_tokenizer(loaded)
