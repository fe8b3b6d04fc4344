"""Loads LoRA adapters, routes the served model name to the newest one, and unloads old ones.

Each version is loaded under its own name and number. vLLM identifies adapters by name, also in its
KV cache, so reusing a name would mix two sets of weights. Requests in flight finish with the
adapter that they started with. An adapter is unloaded when no request can use it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.control import EngineTimeout
from grpo_vllm.engine.vllm_compat.requests import EngineDeadError, LoRARequest
from grpo_vllm.middleware import InFlight
from grpo_vllm.weights.adapter_probe import require_effect

log = structlog.get_logger()

BASE_SUFFIX = "@base"
"""The base model answers under the served name followed by this suffix."""
LOAD_DEADLINE_S = 120.0


class AdapterRefused(GrpoError):
    """The engine cannot load the adapter. It continues to serve the previous weights."""


@dataclass(frozen=True)
class LoadedAdapter:
    """`request`: vLLM's record of the adapter, sent with every generation request. `cohort`: see
    `InFlight`."""

    version: PolicyVersion
    directory: Path
    request: Any
    cohort: int

    @property
    def name(self) -> str:
        name: str = self.request.lora_name
        return name

    def described(self) -> dict[str, Any]:
        return {
            "adapter_name": self.name,
            "adapter_path": str(self.directory),
            "policy_version": list(self.version),
        }


class AdapterSwitch:
    """Args:
    engine: vLLM's engine client
    served_name: the model name that refers to the newest adapter
    in_flight: tracks the requests that may still use an older adapter
    """

    def __init__(self, engine: Any, served_name: str, in_flight: InFlight) -> None:
        self.served_name = served_name
        self.current: LoadedAdapter | None = None
        self._engine = engine
        self._in_flight = in_flight
        self._numbers = 0
        self._former: list[LoadedAdapter] = []
        self._lock = asyncio.Lock()
        self._unloading: set[asyncio.Task[None]] = set()

    async def load(
        self, directory: Path, version: PolicyVersion, probes: bool = True
    ) -> LoadedAdapter:
        """Answer requests that arrive from now on with the adapter in `directory`.

        Args: probes: compare with the base model; False if the engine samples nothing now, or if a
            trainer compares the served logprobs with its own

        Raises:
            AdapterRefused: the engine cannot load it, or this version came from another directory.
            EngineTimeout: the engine did not load it in time; another try may succeed.
        """
        async with self._lock:
            if self.current is not None and self.current.version == version:
                if self.current.directory != directory:
                    raise AdapterRefused(
                        f"the served adapter in {self.current.directory} already has policy "
                        f"version {tuple(version)}; send a newer policy_version to load {directory}"
                    )
                return self.current
            self._numbers += 1
            name = f"{self.served_name}@{version}"
            request = LoRARequest(name, self._numbers, str(directory))
            await self._add(request, probes)
            former = self.current
            self.current = LoadedAdapter(version, directory, request, self._in_flight.next_cohort())
            log.info("adapter.loaded", name=name, directory=str(directory))
            self._retire(former)
            return self.current

    async def rename(self, version: PolicyVersion) -> None:
        """Requests that arrive from now on name this version; the adapter stays the same."""
        async with self._lock:
            if self.current is not None:
                self.current = replace(self.current, version=version)

    async def unload(self) -> None:
        """Serve the base model again."""
        async with self._lock:
            former, self.current = self.current, None
            self._in_flight.next_cohort()
            self._retire(former)

    def directories_in_use(self) -> list[str]:
        """Of all adapters whose files the engine may read, the current one last."""
        used = [*self._former, *([self.current] if self.current else [])]
        return [str(adapter.directory) for adapter in used]

    async def _add(self, request: Any, probes: bool) -> None:
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                workers: list[Any] = [None]
                while None in workers:  # requests for other adapters may evict it meanwhile
                    await self._engine.add_lora(request)
                    workers = await self._engine.collective_rpc(
                        "adapter_modules", kwargs={"number": request.lora_int_id}
                    )
                _require_all_used(workers)
                if probes:
                    await require_effect(self._engine, request)
        except EngineDeadError:
            raise
        except TimeoutError:
            self._in_background(self._remove(request))
            raise EngineTimeout(
                f"the adapter {request.lora_path} was not loaded within {LOAD_DEADLINE_S:g} s; "
                "send the request again; if that fails too, see the server log"
            ) from None
        except Exception as error:  # the engine raises any error of its worker unchanged
            self._in_background(self._remove(request))
            raise AdapterRefused(f"cannot load the adapter {request.lora_path}: {error}") from error

    def _retire(self, former: LoadedAdapter | None) -> None:
        if former is not None:
            self._former.append(former)
            self._in_background(self._unload(former))

    async def _unload(self, former: LoadedAdapter) -> None:
        await self._in_flight.finished_up_to(former.cohort)
        await self._remove(former.request)
        self._former.remove(former)
        log.info("adapter.unloaded", name=former.name)

    async def _remove(self, request: Any) -> None:
        """Remove the adapter from the engine. If that fails, the engine evicts it for a newer one,
        because no request uses it any more."""
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                await self._engine.remove_lora(request.lora_int_id)
        except Exception as error:  # noqa: BLE001 - as in `_add`
            log.warning(
                "adapter.not_removed",
                name=request.lora_name,
                reason=str(error) or type(error).__name__,
            )

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)


def _require_all_used(workers: Sequence[Mapping[str, list[str]]]) -> None:
    """Raises `ValueError` if vLLM has left modules of the adapter out. `workers`: the
    `adapter_modules` of each."""
    held, computed = (sorted({n for w in workers for n in w[key]}) for key in ("held", "computed"))
    unused = [name for name in held if name not in computed]
    if unused:
        raise ValueError(
            f"{len(unused)} of its {len(held)} modules are not in the model, for example "
            f"{unused[0]}; the model has, for example, {computed[-1]}. Load an adapter of this "
            "model, or rename the tensors in its file"
        )


class AdapterNames(MutableMapping[str | None, Any]):
    """Model name → adapter, for vLLM's routes. The served name, an empty name and the current
    adapter's own name all refer to the current adapter."""

    def __init__(self, switch: AdapterSwitch) -> None:
        self._switch = switch

    def __getitem__(self, name: str | None) -> Any:
        current = self._switch.current
        if current is None or name not in (None, "", self._switch.served_name, current.name):
            raise KeyError(name)
        return current.request

    def __iter__(self) -> Iterator[str | None]:
        """One name per adapter, because vLLM lists the models with these names."""
        return iter([self._switch.current.name] if self._switch.current else [])

    def __len__(self) -> int:
        return int(self._switch.current is not None)

    def __setitem__(self, name: str | None, request: Any) -> None:
        raise AdapterRefused(f"adapter {name} was not loaded; load adapters with POST /lora/load")

    def __delitem__(self, name: str | None) -> None:
        raise AdapterRefused(f"adapter {name} was not unloaded; unload it with POST /lora/unload")
