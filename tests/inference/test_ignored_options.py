from __future__ import annotations

import pytest

# vLLM's modules warn when they are first imported, which may be here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(
    "option",
    [
        ("--ssl-keyfile", "k.pem"),
        ("--ssl-certfile", "c.pem"),
        ("--api-server-count", "3"),
        ("--lora-modules", "a=/x"),
        ("--uds", "/tmp/socket"),
        ("--headless",),
    ],
)
def test_options_without_effect_are_refused_by_name(option: tuple[str, ...]) -> None:
    from grpo_vllm.engine.args import refuse_ignored_options
    from grpo_vllm.engine.vllm_compat.launch import parse_engine_arguments

    with pytest.raises(SystemExit, match=rf"no effect here; remove them: {option[0]} \("):
        refuse_ignored_options(parse_engine_arguments(["--model", "m", *option]))


def test_their_defaults_are_accepted() -> None:
    from grpo_vllm.engine.args import refuse_ignored_options
    from grpo_vllm.engine.vllm_compat.launch import parse_engine_arguments

    refuse_ignored_options(parse_engine_arguments(["--model", "m"]))
