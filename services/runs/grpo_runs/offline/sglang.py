"""SGLang's HTTP API, as far as the offline trainer needs it, and the publication of the trained
weights to such a server. Seen with SGLang 0.5.23."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import structlog
import torch
from pydantic import BaseModel, TypeAdapter

from grpo_core.clients.inference import Completion, GenerateAnswer
from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.errors import ProtocolViolation, RequestRefused, parsing
from grpo_core.weights.versions import Announcement
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.inference.server import Home
from grpo_runs.offline.errors import ServerUnsuitable
from grpo_trainer.checks.served_weights import DEFAULT_BLOCK, Bound, ProbeLengths
from grpo_trainer.errors import PolicyMismatch, ServedWeightsDiffer, WeightsRefused
from grpo_trainer.model.loading import device_to_load_on, import_architecture
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.files import DirectorySync

log = structlog.get_logger()

SERVICE = "SGLang"
HINT = "start the server, or check generation.base_url"
"""If nothing listens at the URL."""
AUTO = "auto"
UNTRAINED = PolicyVersion(0, 0)
"""The version of weights that no trainer of ours published."""
PUBLISH_DEADLINE_S = 600.0
"""For the server to finish its requests and load new weights."""
_INVALID_LAST = "\N{REPLACEMENT CHARACTER}"
_SHORT_NAMES = {"half": "float16", "float": "float32"}

TokenLogprob = tuple[float, int, str | None]
FirstLogprob = tuple[float | None, int, str | None]
"""The first token of a prompt has no logprob."""


class _FinishReason(BaseModel):
    """`matched`: the end token, or the text of `stop` that ended the completion."""

    type: str
    matched: int | str | list[int] | None = None


class _Span(BaseModel):
    """Tokens that were sampled from one version of the weights."""

    version: str


class _Meta(BaseModel):
    finish_reason: _FinishReason
    output_token_logprobs: list[TokenLogprob] = []
    input_token_logprobs: list[FirstLogprob] = []
    weight_version: str = ""
    weight_versions: list[_Span] = []


class _Generated(BaseModel):
    """One completion in the answer of `POST /generate`."""

    text: str
    output_ids: list[int]
    meta_info: _Meta


# The answer is an object for n=1 and a list for more.
_ANSWER: TypeAdapter[_Generated | list[_Generated]] = TypeAdapter(_Generated | list[_Generated])


class ServerInfo(BaseModel):
    """The fields of `GET /server_info` that a trainer reads. Its `weight_version` stays that of the
    server's start.

    dtype: as the server's option.
    page_size: tokens in one block of the KV cache.
    max_req_input_len: longest prompt, in tokens.
    """

    dtype: str
    page_size: int | None = None
    max_req_input_len: int | None = None

    @property
    def torch_dtype(self) -> str | None:
        """The name of a data type of torch; None if SGLang derives it from the model."""
        return None if self.dtype == AUTO else _SHORT_NAMES.get(self.dtype, self.dtype)


def version_named(text: str) -> PolicyVersion | None:
    """The policy version of SGLang's `weight_version`; None if no trainer of ours named it."""
    try:
        return PolicyVersion.parse(text)
    except ValueError:
        return None


def _body(
    token_ids: list[int], *, max_tokens: int, n: int = 1, top_k: int = 0, **others: Any
) -> dict[str, Any]:
    """Of `POST /generate`, by vLLM's sampling parameters.

    Without a parameter, SGLang takes the one of the model's generation configuration. So those that
    change the distribution are always sent.
    """
    every_token = -1
    named = {"n": n, "max_new_tokens": max_tokens, "top_k": every_token if top_k < 1 else top_k}
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    params = neutral | named | others
    return {"input_ids": token_ids, "sampling_params": params, "return_logprob": True}


def answer_of(response: httpx.Response, prompt_token_ids: list[int]) -> GenerateAnswer:
    """The answer of `POST /generate` in the form of vllm-api-server.

    Raises:
        ProtocolViolation: a field is missing, or a logprob is not finite.
    """
    rows = _generated(response)
    return GenerateAnswer(
        text=[_text(row) for row in rows],
        prompt="",
        finish_reasons=[row.meta_info.finish_reason.type for row in rows],
        logprobs=[
            [[{token: logprob}] for logprob, token, _ in row.meta_info.output_token_logprobs]
            for row in rows
        ],
        prompt_token_ids=prompt_token_ids,
        token_ids=[row.output_ids for row in rows],
        policy_version=[_versions(row.meta_info) for row in rows],
    )


def _generated(response: httpx.Response) -> list[_Generated]:
    hint = "if a logprob is null, it is not finite: check the weights for NaN"
    with parsing(f"{SERVICE}: the response from /generate is invalid ({hint})"):
        found = _ANSWER.validate_json(response.content)
    rows = found if isinstance(found, list) else [found]
    for row in rows:
        if [token for _, token, _ in row.meta_info.output_token_logprobs] != row.output_ids:
            raise ProtocolViolation(
                f"{SERVICE}: output_token_logprobs in the response from /generate has other tokens "
                "than output_ids; use a version of SGLang that works with this trainer: 0.5.23"
            )
    return rows


def _text(row: _Generated) -> str:
    """vLLM leaves out bytes at the end that are no whole character; SGLang replaces them."""
    is_cut_at_text = isinstance(row.meta_info.finish_reason.matched, str)
    return row.text if is_cut_at_text else row.text.rstrip(_INVALID_LAST)


def _versions(meta: _Meta) -> tuple[PolicyVersion, PolicyVersion]:
    names = [span.version for span in meta.weight_versions] or [meta.weight_version]
    first, last = (version_named(name) or UNTRAINED for name in (names[0], names[-1]))
    return first, last


class SglangClient(ServiceClient):
    """A trainer's client."""

    def info(self) -> ServerInfo:
        """Raises `ServiceUnavailable`, `RequestRefused`, `ProtocolViolation`."""
        response = self.send("GET", "/server_info")
        with parsing(f"{SERVICE}: the response from /server_info is invalid"):
            return ServerInfo.model_validate_json(response.content)

    def weight_version(self) -> PolicyVersion | None:
        """The version of the served weights; None if no trainer of ours published them."""
        return version_named(str(self.send("GET", "/model_info").json().get("weight_version")))

    def load_weights(self, directory: Path, version: PolicyVersion) -> None:
        """Let the server load a model directory. It first finishes the requests in flight, and it
        empties its KV cache.

        Raises:
            WeightsRefused: the server did not load it.
            ServiceUnavailable: no answer within `PUBLISH_DEADLINE_S`.
        """
        body = {"model_path": str(directory), "weight_version": str(version)}
        try:
            self.send(
                "POST",
                "/update_weights_from_disk",
                deadline_s=PUBLISH_DEADLINE_S,
                timeout=PUBLISH_DEADLINE_S,
                json=body,
            )
        except RequestRefused as error:
            raise WeightsRefused(
                f"{SERVICE} at {self.base_url} did not load policy version {version} from "
                f"{directory}: {error}. The server must see this directory under the same path, "
                "with the model that it was started with; then start the run again"
            ) from error

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of token_ids[1:] at temperature 1: [T] → [T-1]."""
        # Without a start, SGLang returns the logprobs of the completion alone.
        body = _body(token_ids, max_tokens=1) | {"logprob_start_len": 0}
        response = self.send("POST", "/generate", json=body)
        entries = _generated(response)[0].meta_info.input_token_logprobs
        # Their tokens cannot be compared: SGLang reports the last one of the vocabulary as 0.
        found = [logprob for logprob, _, _ in entries[1:] if logprob is not None]
        if len(found) != len(token_ids) - 1:
            raise ProtocolViolation(
                f"{SERVICE}: input_token_logprobs in the response from /generate does not hold the "
                f"logprobs of the {len(token_ids)} tokens of the prompt"
            )
        return found

    def sample(self, prompt_token_ids: list[int], **sampling: Any) -> Completion:
        """Sample one completion of one prompt."""
        response = self.send("POST", "/generate", json=_body(prompt_token_ids, **sampling))
        return answer_of(response, prompt_token_ids).completions()[0]


class SglangGeneration(AsyncServiceClient):
    """A source of completions.

    Its logprobs are those of softmax(logits / temperature), after a repetition penalty and before
    top-k and top-p. They are those of the logits themselves at temperature 0, and also if the
    server runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1, which the trainer's checks refuse.
    """

    async def generate(
        self,
        prompt_token_ids: list[int],
        home: Home | None = None,  # noqa: ARG002 - there is one server
        **sampling: Any,
    ) -> GenerateAnswer:
        """Sample completions; the parameters have vLLM's names.

        Raises:
            RequestRefused, ServiceUnavailable, ProtocolViolation: as other clients.
        """
        response = await self.send("POST", "/generate", json=_body(prompt_token_ids, **sampling))
        return answer_of(response, prompt_token_ids)


@dataclass(eq=False, kw_only=True)
class SglangWeights(DirectorySync):
    """A `WeightSync`. Every run first publishes its own weights.

    Args:
        server: the trainer's client
    """

    server: SglangClient
    _served: PolicyVersion = field(init=False, default=UNTRAINED)

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """Load the model from disk.

        Raises:
            ServiceUnavailable: no server answers.
            ServerUnsuitable: an adapter is to be trained.
            PolicyMismatch: the server has another data type.
            NoSuchDevice: the GPU to train on does not exist.
        """
        if self.weights.lora is not None:
            raise ServerUnsuitable(
                f"an adapter cannot be published to SGLang at {self.server.base_url}; train the "
                "whole model: remove the LoRA options. Or start vllm-api-server with "
                "--enable-lora, and set generation.backend=vllm_server and sync.mode=lora_only"
            )
        device = device_to_load_on(self.device)
        info = self.server.info()
        dtype = _dtype_to_load(self.dtype, info)
        import_architecture(self.weights.model_name)
        block = max(info.page_size or 0, DEFAULT_BLOCK)
        lengths = ProbeLengths.fitting(block, info.max_req_input_len)
        return self._take_policy(dtype, device, lengths)

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Publish the master weights under a new epoch: later than the server's, than `last_epoch`
        and than that of every directory."""
        served = self.server.weight_version() or UNTRAINED
        self._begin(optimizer, step, bound, (last_epoch, served.epoch))
        self.publish_now("At the start")
        return self.version

    def recover_server(self) -> None:
        """Publish the weights again if the server restarted; else check that it still serves them.

        Raises:
            ServiceUnavailable: no server answers.
            ServedWeightsDiffer: it serves other weights.
        """
        served = self.server.weight_version()
        if served is None:
            log.warning("weights.lost", lost_policy_version=tuple(self._served))
            self.publish_now("After a restart of the server")
        elif served != self._served:
            raise ServedWeightsDiffer(
                f"SGLang at {self.server.base_url} serves policy version {served}, but this run "
                f"published {self._served}: another run publishes to this server. Give each run a "
                "server of its own, or start the runs one after the other"
            )
        elif self.version == self._served:
            self._check.require(served, "Since the publication")

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Raises `ServiceUnavailable`, `ProtocolViolation`."""
        return self.server.prompt_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Sample exactly `max_tokens` tokens at temperature 1. Raises as `served_logprobs`."""
        return self.server.sample(prompt_token_ids, max_tokens=max_tokens, ignore_eos=True)

    def close(self) -> None:
        self.server.close()

    def _serve(self, announced: Announcement) -> None:
        """Raises `WeightsRefused`, `ServiceUnavailable`: the server serves the previous weights, or
        none."""
        directory = self.directories.path_of(announced.version)
        self.server.load_weights(directory.absolute(), announced.version)
        self._served = announced.version


def _dtype_to_load(wanted: str, info: ServerInfo) -> torch.dtype:
    """The data type to load the model in. If SGLang derives its own from the model, the first
    publication compares both.

    Args:
        wanted: "auto" for the server's

    Raises:
        PolicyMismatch: the server has another one, or does not name its own.
    """
    served = info.torch_dtype
    chosen = served if wanted == AUTO else wanted
    if chosen is None:
        raise PolicyMismatch(
            "SGLang derives the data type of its weights from the model, so the trainer cannot "
            "take the same one: start the server with --dtype bfloat16, or set model.dtype"
        )
    if served not in (None, chosen):
        raise PolicyMismatch(
            f"model.dtype={chosen}, but SGLang serves weights in {served}: start the server with "
            f"--dtype {chosen}, or set model.dtype={served}"
        )
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype
