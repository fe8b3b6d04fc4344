"""Models and devices that a run cannot use are named when it begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HrmTextConfig, HrmTextForCausalLM, T5Config

from grpo_core.gpu import NoSuchDevice
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_core.weights.shared_memory import CudaMemory, CudaPlace
from grpo_trainer.errors import PolicyMismatch, UnreachableWeights, UnsupportedModel
from grpo_trainer.model.adapter import with_adapter
from grpo_trainer.model.loading import (
    TrainedWeights,
    device_to_load_on,
    import_architecture,
    require_device,
)
from grpo_trainer.model.policy import end_tokens_of
from grpo_trainer.weight_sync.shared_memory import OwnPlace, build_policy, map_cuda
from tests.unit.trainer.served_memory import served
from tests.unit.trainer.tiny_policy import LORA, model_directory


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_host_and_a_gpu_is_refused() -> None:
    assert device_to_load_on("auto") == torch.device("cpu")
    for wanted in ("cuda", "cuda:3"):
        with pytest.raises(NoSuchDevice, match=f"--device {wanted}: torch .* finds no GPU"):
            device_to_load_on(wanted)


def test_shared_weights_need_the_device_that_they_are_on_and_make_it_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for wanted in ("auto", "cuda", "cuda:1"):
        require_device(wanted, torch.device("cuda:1"))
    require_device("auto", torch.device("cpu"))
    assert current == [torch.device("cuda:1")] * 3
    assert [device_to_load_on(wanted) for wanted in ("auto", "cuda:1")] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ]
    assert current[3:] == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(PolicyMismatch, match=r"--device cuda:0, but .* are on cuda:1"):
        require_device("cuda:0", torch.device("cuda:1"))
    with pytest.raises(PolicyMismatch, match=r"--device cuda, but .* are on cpu"):
        require_device("cuda", torch.device("cpu"))


SERVER = CudaPlace(
    device_uuid="GPU-a",
    device_name="H200",
    torch="2.11 with CUDA 13",
    pid_namespace=7,
    shm_filesystem=9,
)
OWN = OwnPlace(
    devices={"GPU-b": 0, "GPU-a": 1}, torch="2.11 with CUDA 13", pid_namespace=7, shm_filesystem=9
)


def test_all_obstacles_to_memory_on_a_gpu_are_named_before_cuda_is_called() -> None:
    assert OWN.obstacles(SERVER) == []
    elsewhere = OwnPlace(
        devices={"GPU-b": 0}, torch="2.13 with CUDA 13", pid_namespace=1, shm_filesystem=1
    )
    with pytest.raises(UnreachableWeights) as refused:
        map_cuda(Mock(), CudaMemory(place=SERVER, segments=()), elsewhere)
    for named in (
        "H200 GPU-a; this process sees GPU-b",
        "torch 2.11 with CUDA 13, this process 2.13",
        "pid: service",
        "ipc: service",
    ):
        assert named in str(refused.value)


def test_an_adapter_says_how_to_merge_it(tmp_path: Path) -> None:
    base = TrainedWeights(str(model_directory(tmp_path / "base"))).load(torch.float32)
    with_adapter(base, LORA).save_pretrained(tmp_path / "adapter")  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match="is an adapter; merge it into its base model"):
        TrainedWeights(str(tmp_path / "adapter")).load(torch.float32)


def test_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('was run')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UnsupportedModel, match=r"code of its own \(auto_map\) is not run"):
        import_architecture(str(tmp_path))


def test_a_model_that_does_not_continue_text_is_named(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="a t5 is no causal language model"):
        import_architecture(str(tmp_path))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        ({"tie_word_embeddings": False}, dict, r"lack .*: lm_head\.weight; set tie_word_emb"),
        (
            {},
            lambda found: {f"_orig_mod.{name}": tensor for name, tensor in found.items()},
            r"lack .* and \d+ more; the files name .*: _orig_mod\.model\..* without what wraps it",
        ),
        (
            {},
            lambda found: {name: tensor for name, tensor in found.items() if "1.mlp" not in name},
            r"lack .*: model\.layers\.1\.mlp\.down_proj\.weight, .*; download or copy",
        ),
        ({"vocab_size": 300}, dict, r"embed_tokens\.weight \[259, 32\] instead of \[300, 32\]"),
        ({"vocab_size": 200}, dict, "pad_token_id of config.json must be below its vocab_size"),
        ({}, lambda found: found | {HEAD: found[EMBEDDING] * 2}, "a head with other values"),
    ],
)
def test_a_model_that_its_files_do_not_hold_is_refused(
    config: dict[str, Any], change: Callable[[Tensors], Tensors], named: str, tmp_path: Path
) -> None:
    model = model_directory(tmp_path)
    settings, weights = model / "config.json", model / "model.safetensors"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    save_file(change(load_file(weights)), weights)
    with pytest.raises(UnusableWeights, match=named):
        import_architecture(str(model))
    weights.unlink()
    with pytest.raises(UnusableWeights, match=r"no file named model\.safetensors"):
        import_architecture(str(model))


def test_a_head_that_equals_the_tied_embedding_may_be_in_the_files(tmp_path: Path) -> None:
    model = model_directory(tmp_path)
    found = load_file(weights := model / "model.safetensors")
    save_file(found | {HEAD: found[EMBEDDING].clone()}, weights)
    import_architecture(str(model))


def test_an_export_has_the_rules_of_the_models_tokenizer_json(tmp_path: Path) -> None:
    model, target = model_directory(tmp_path / "model"), tmp_path / "export"
    file = model / "tokenizer_config.json"
    words = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    file.write_text(json.dumps(words))
    weights = TrainedWeights(str(model))
    weights.write(weights.load(torch.float32), target, with_tokenizer=True)
    rules = [json.loads((place / "tokenizer.json").read_text()) for place in (model, target)]
    assert rules[0] == rules[1]


def test_an_export_joins_weights_that_are_one_tensor_of_the_models_files(tmp_path: Path) -> None:
    config = HrmTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2
    )
    HrmTextForCausalLM(config).save_pretrained(model := tmp_path / "model")
    weights = TrainedWeights(str(model))
    weights.write(weights.load(torch.float32), target := tmp_path / "export")
    saved, exported = (load_file(place / "model.safetensors") for place in (model, target))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


def test_end_tokens_of_the_generation_configuration_count_in_shared_memory_too(
    tmp_path: Path,
) -> None:
    model = model_directory(tmp_path / "model")
    file = model / "generation_config.json"
    own = json.loads((model / "config.json").read_text())["eos_token_id"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [own, 5]}))
    of_files = TrainedWeights(str(model)).load(torch.float32)
    assert end_tokens_of(of_files) == {own, 5}
    assert end_tokens_of(build_policy(str(model), served(model))) == {own, 5}
