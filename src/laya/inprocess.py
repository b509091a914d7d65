"""Engines of this process, put together from configuration: check, plan, then a backend that loads on its own thread.

In: the configuration. Out: `EngineBackend`s by target name, not started. The only file beside `app` that sees engine and model
together; torch is imported here and nowhere before. Start-up, before anything listens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from laya import dependencies
from laya.config import DEFAULT_MODEL, Config, InferenceConfig, served_name
from laya.engine.backend import EngineBackend
from laya.engine.budget import Plan, PlanSettings, plan, shape_of
from laya.engine.machine import Memory, host_memory
from laya.engine.settings import EngineSettings
from laya.errors import ConfigError, StartError
from laya.log import Log
from laya.schema.generation import ModelCard

BLOCK_TOKENS = 16  # small enough that a sequence wastes little of its last block, large enough to copy and hash quickly


def build_engines(
    config: Config, *, post: Callable[[Callable[[], None]], Any], on_failed: Callable[[StartError, bool], None], log: Log
) -> dict[str, EngineBackend]:
    """One backend for each engine, in the order written. Raises StartError for what would keep one from running.

    `on_failed(error, was_ready)` is called on the loop thread when an engine ends by itself.
    """
    engines: dict[str, EngineBackend] = {}
    taken = 0  # what the engines before have planned of the common limit
    for name, settings in config.engines_by_name().items():
        path = _model_path(config, settings)
        dependencies.check(dependencies.ENGINE)
        device = _choose(settings, log)
        engines[name], planned = _build(name, settings, path, device, config, taken, post, on_failed, log)
        taken += planned
    return engines


def _build(name, settings, path, device, config, taken, post, on_failed, log) -> tuple[EngineBackend, int]:
    try:
        from laya.model.describe import describe
        from laya.model.load import load
    except ImportError as exc:  # a package of a version that lacks a name we need
        raise dependencies.unfit(exc) from None

    description = describe(path, device=device)
    made = _plan(name, settings, description, device, config, taken, log)
    card = ModelCard(
        id=served_name(settings), max_model_len=made.max_seq_len, chat=description["chat_template"],
        details={"state": "loading", "engine": "torch", "device": device},
    )  # fmt: skip
    threads = settings.threads or max(1, (os.cpu_count() or 2) - 1)
    work = partial(
        load, path, device=device, max_seq_len=made.max_seq_len, num_blocks=made.num_blocks, block_size=BLOCK_TOKENS,
        threads=threads, swap_bytes=0 if device == "cpu" else settings.swap_space, max_num_seqs=settings.max_num_seqs,
        prefill_chunk_tokens=settings.prefill_chunk_tokens, model_id=card.id,
    )  # fmt: skip
    ready = False

    def on_state(state: str) -> None:
        nonlocal ready
        log.event("info", "engine", engine=name, state=state)
        if state == "ready":
            ready = True
        elif state == "failed":
            on_failed(_reason(name, backend.failure), ready)

    backend = EngineBackend(name=name, load=work, settings=_bounds(settings), post=post, card=card, on_state=on_state)
    return backend, made.device_total


def _model_path(config: Config, settings: InferenceConfig) -> str:
    base = os.path.dirname(config.source) if config.source else ""
    path = os.path.join(base, settings.model)
    if not os.path.exists(path):
        mend = "bring it with: laya pull default" if settings.model == DEFAULT_MODEL else "see inference.model"
        raise StartError(f"the model {path} is not there; {mend}")
    return path


def _choose(settings: InferenceConfig, log: Log) -> str:
    """The device; refuses an engine that this machine cannot run, saying what `auto` would do."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.engine == "nano-vllm":
        missing = []
        if device == "cpu":
            missing.append("a CUDA device")
        if dependencies.installed_version("nano-vllm") is None and dependencies.installed_version("nano-vllm-fork") is None:
            missing.append("the nano-vllm package (pip install 'laya-server[nano-vllm]')")
        if missing:
            raise StartError(
                f"inference.engine: nano-vllm needs {' and '.join(missing)}; "
                f"`engine: auto` would take the torch engine on {device}"
            )
        raise StartError("inference.engine: nano-vllm cannot be driven yet; `engine: auto` takes the torch engine")
    if settings.swap_space and device == "cpu":
        log.event("warning", "no_effect", text="inference.swap_space does nothing on the CPU: KV is in host memory already")
    log.event("info", "engine_chosen", engine="torch", device=device, asked=settings.engine)
    return device


def _plan(name, settings: InferenceConfig, description, device: str, config: Config, taken: int, log: Log) -> Plan:
    """The memory plan of one engine; what the others took is not available to it."""
    host = host_memory()
    card = _card_memory() if device == "cuda" else host
    wanted = PlanSettings(
        device=device,
        device_memory=Memory(card.total, max(0, card.available - taken)),
        host_memory=host,
        utilisation=settings.gpu_memory_utilization,
        reserve=settings.reserve,
        max_seq_len=settings.max_seq_len,
        max_num_seqs=settings.max_num_seqs,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        kv_cache=None if settings.kv_cache == "auto" else settings.kv_cache,
        swap_space=settings.swap_space,
        enforce_eager=settings.enforce_eager,
        block_tokens=BLOCK_TOKENS,
        host_extra=config.server.max_buffered_bytes + (config.stages.cache.max_bytes if config.stages.cache.enabled else 0),
    )
    made = plan(shape_of(description), wanted)
    if not made.fits and settings.fit == "shrink":
        made = _shrunk(name, description, wanted, made, log)
    if not made.fits:
        raise StartError(f"the memory plan of engine {name} does not fit:\n{made.table()}")
    if settings.max_seq_len is not None and settings.max_seq_len > description["context_length"]:
        log.event("warning", "window_clamped", engine=name, asked=settings.max_seq_len, window=made.max_seq_len)
    log.event(
        "info", "plan", engine=name, device=made.device, host=made.host, limit=made.device_limit, window=made.max_seq_len,
        kv_blocks=made.num_blocks,
    )  # fmt: skip
    return made


def _shrunk(name: str, description, wanted: PlanSettings, made: Plan, log: Log) -> Plan:
    import msgspec

    for suggestion in made.suggestions:
        if suggestion.changes:
            log.event("warning", "shrunk", engine=name, **suggestion.changes)
            return plan(shape_of(description), msgspec.structs.replace(wanted, **suggestion.changes))
    return made


def _card_memory() -> Memory:
    import torch

    available, total = torch.cuda.mem_get_info()
    return Memory(total, available)


def _bounds(settings: InferenceConfig) -> EngineSettings:
    names = (
        "max_num_seqs", "max_concurrent_prefills", "prefill_chunk_tokens", "queue_limit", "queue_tokens", "queue_timeout_s",
        "step_timeout_s", "max_prompt_tokens",
    )  # fmt: skip
    return EngineSettings(**{name: getattr(settings, name) for name in names})


def _reason(name: str, failure: BaseException | None) -> StartError:
    """Why an engine ended, in one line: the package at fault where there is one."""
    if isinstance(failure, StartError):
        return failure
    if failure is None:
        return StartError(f"engine {name} failed")
    return dependencies.blame(failure) or ConfigError(f"engine {name} failed: {type(failure).__name__}; its log has the place")
