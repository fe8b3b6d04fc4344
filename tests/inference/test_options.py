"""Options that reach vLLM changed, unchanged or not at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import LlamaConfig

from grpo_core import cpu
from grpo_core.weights.directory_checks import UnusableWeights
from tests.support.shapes import Shape
from tests.unit.trainer.tiny_policy import model_directory

# vLLM's modules warn when they are first imported, which may be here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def args() -> ModuleType:
    from grpo_vllm.engine import args

    return args


@pytest.mark.parametrize(
    "option",
    [
        ("--ssl-keyfile", "k.pem"),
        ("--api-server-count", "3"),
        ("--lora-modules", "a=/x"),
        ("--uds", "/tmp/socket"),
        ("--headless",),
    ],
)
def test_options_without_effect_are_refused_by_name(
    args: ModuleType, option: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match=rf"no effect here; remove them: {option[0]} \("):
        args.refuse_ignored_options(args.parse_engine_arguments(["--model", "m", *option]))


def test_several_workers_are_refused_by_name_if_they_would_share_weights(args: ModuleType) -> None:
    words = ["--model", "m", "--tensor-parallel-size", "2", "--data-parallel-size", "4"]
    named = "supports one worker; remove --tensor-parallel-size 2, --data-parallel-size 4"
    with pytest.raises(SystemExit, match=named):
        args.refuse_parallel_engines(args.parse_engine_arguments(words))


@pytest.mark.parametrize(
    ("is_slow", "asked", "found"),
    [(True, "auto", "float32"), (True, "bfloat16", "bfloat16"), (False, "auto", "auto")],
)
def test_float32_is_the_default_where_bfloat16_is_slow(
    args: ModuleType, is_slow: bool, asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CPU", dataclasses.replace(cpu.CPU, is_slow_in_bfloat16=is_slow))
    arguments = args.parse_engine_arguments(["--model", "m", "--dtype", asked])
    args.adapt_to_cpu(arguments)
    assert arguments.dtype == found


@pytest.mark.parametrize("length", ["50", "256"])
def test_the_cache_of_a_cpu_holds_the_longest_sequence_and_no_share_of_the_memory(
    args: ModuleType, length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from grpo_vllm.engine.vllm_compat import launch

    monkeypatch.setattr(launch, "LEAST_KV_CACHE", 0)
    words = ["--model", str(model_directory(tmp_path)), "--max-model-len", length]

    def sized(*more: str) -> Any:
        arguments = args.parse_engine_arguments([*words, *more])
        args.adapt_to_cpu(arguments)
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        launch.size_kv_cache(config)
        return config

    config = sized()
    model, block_size = config.model_config, config.cache_config.block_size
    layer = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    needed = layer.max_memory_usage_bytes(config) * model.get_num_layers(config.parallel_config)
    more = layer.page_size_bytes * model.get_num_layers(config.parallel_config)
    assert config.cache_config.kv_cache_memory_bytes == needed + more
    assert sized("--kv-cache-memory-bytes", "5000").cache_config.kv_cache_memory_bytes == 5000
    shared = sized("--gpu-memory-utilization", "0.4").cache_config
    assert shared.kv_cache_memory_bytes is None


async def test_a_model_with_random_weights_is_not_served(args: ModuleType, tmp_path: Path) -> None:
    from grpo_vllm.engine.vllm_compat.launch import open_engine

    model = model_directory(tmp_path)
    file = model / "config.json"
    file.write_text(file.read_text().replace('embeddings": true', 'embeddings": false'))
    arguments = args.parse_engine_arguments(["--model", str(model)])
    with pytest.raises(UnusableWeights, match=r"lack .*: lm_head\.weight"):
        async with open_engine(arguments):
            pass


async def test_heads_that_the_cpu_build_does_not_compute_are_refused(
    args: ModuleType, tmp_path: Path
) -> None:
    from grpo_vllm.engine.vllm_compat.launch import open_engine

    model = Shape(LlamaConfig, vocabulary=512, changes={"head_dim": 16}).save(tmp_path)
    arguments = args.parse_engine_arguments(["--model", str(model)])
    with pytest.raises(SystemExit, match="attention heads have size 16"):
        async with open_engine(arguments):
            pass


def test_the_server_keeps_to_the_rules_of_tokenizer_json(
    args: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert args
    from vllm.tokenizers import get_tokenizer, registry

    from grpo_vllm.engine.vllm_compat.launch import use_file_tokenizer

    model, found = model_directory(tmp_path), dict(registry.TokenizerRegistry.tokenizers)
    file = model / "tokenizer_config.json"
    words = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    file.write_text(json.dumps(words))
    (model / "config.json").unlink()  # so that the class is the one of that file
    monkeypatch.setattr(registry.TokenizerRegistry, "tokenizers", found)
    use_file_tokenizer()
    tokenizer = get_tokenizer(str(model))
    assert tokenizer.decode(tokenizer.encode("3 + 4 =\n what")) == "3 + 4 =\n what"
