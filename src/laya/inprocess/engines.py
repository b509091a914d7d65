"""A backend for each engine of the configuration: checked, planned, and told how to load on its own thread.

In: the configuration. Out: `EngineBackend`s, or `OnDemandEngine`s around them, by target name, not started. Torch is imported
here and nowhere before. Start-up, before anything listens.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from laya import dependencies
from laya.config import Config
from laya.engine.backend import EngineBackend
from laya.engine.heap import loaded_tightly
from laya.engine.machine import Memory, host_memory
from laya.engine.on_demand import OnDemandEngine
from laya.engine.settings import EngineSettings
from laya.engine.step import DeviceLost
from laya.errors import ConfigError, DeviceGone, EngineDied, StartError
from laya.inprocess.cards import card_before_loading, with_settings
from laya.inprocess.choice import unused
from laya.inprocess.loading import LoadingProgress
from laya.inprocess.plans import EnginePlan, Machine, model_path, plan_engines
from laya.log import Log

Engine = EngineBackend | OnDemandEngine


def build_engines(
    config: Config, *, post: Callable[[Callable[[], None]], Any], on_failed: Callable[[StartError, bool], None], log: Log
) -> dict[str, Engine]:
    """One target for each engine, in the order written. Raises StartError for what would keep one from running.

    `on_failed(error, was_ready)` is called on the loop thread when an engine ends by itself.
    """
    for settings in config.engines_by_name().values():
        model_path(config, settings)  # said before torch is imported, which takes seconds
    dependencies.check(dependencies.ENGINE)
    device = _device()
    machine = Machine(host_memory(), _card_memory() if device == "cuda" else None)
    made = plan_engines(config, machine, _product_holds())
    for engine in made:
        _tell_choice(engine, device, log)
    _insist(made, log)
    return {engine.name: _engine(engine, device, post, on_failed, log) for engine in made}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _product_holds() -> Callable[[str, int, int], bool]:
    try:
        from laya.model.int4 import product_holds
    except ImportError as exc:  # a package of a version that lacks a name we need
        raise dependencies.unfit(exc) from None
    return product_holds


def _tell_choice(engine: EnginePlan, device: str, log: Log) -> None:
    """Which engine and why, and what it does not look at of the settings."""
    choice, name = engine.choice, engine.name
    asked = engine.settings.engine
    log.event("info", "engine_chosen", engine=name, chosen=choice.engine, device=device, asked=asked, why=choice.why)
    for setting, why in unused(engine.settings, choice, device).items():
        log.event("warning", "no_effect", engine=name, setting=f"inference.{setting}", text=why)


def _card_memory() -> Memory:
    import torch

    available, total = torch.cuda.mem_get_info()
    return Memory(total, available)


def _insist(made: list[EnginePlan], log: Log) -> None:
    """A plan that does not fit stops the start with its numbers; one that does is told."""
    for engine in made:
        plan = engine.plan
        if not plan.fits:
            raise StartError(f"the memory plan does not fit:\n{engine.table()}")
        if engine.shrunk:
            log.event("warning", "shrunk", engine=engine.name, **engine.shrunk)
        asked, own = engine.settings.max_seq_len, engine.description["context_length"]
        if asked is not None and asked > own:
            log.event(
                "warning", "window_clamped", engine=engine.name, asked=asked, window=plan.max_seq_len,
                text=f"the model's own window is {own} tokens",
            )  # fmt: skip
        log.event(
            "info", "plan", engine=engine.name, device=plan.device, host=plan.host, limit=plan.device_limit,
            window=plan.max_seq_len, kv_blocks=plan.num_blocks,
        )  # fmt: skip


def _engine(engine: EnginePlan, device: str, post, on_failed, log: Log) -> Engine:
    name, settings, plan = engine.name, engine.settings, engine.plan
    on_demand = settings.load == "on_demand" or settings.idle_unload_s is not None
    card = card_before_loading(engine, device)
    work = _loader(engine, device, card.id)
    if on_demand:  # read now, before anything is served, and kept while the model sleeps: it is small beside the weights
        work = partial(work, tokenizer=_tokenizer(engine))
    bounds = _bounds(engine)

    def make(on_state: Callable[[EngineBackend, str], None]) -> EngineBackend:
        progress = LoadingProgress(name, post, log)
        loading = loaded_tightly(with_settings(partial(work, progress=progress), engine))
        backend = EngineBackend(
            name=name, load=loading, settings=bounds, post=post, card=card, plan=plan,
            on_state=lambda state: on_state(backend, state),
        )  # fmt: skip
        progress.backend = backend
        return backend

    ready = False

    def changed(target: Engine, state: str) -> None:
        nonlocal ready
        log.event("info", "engine", engine=name, state=state)
        if state == "ready":
            ready = True
            if not on_demand:  # what is frozen is never collected, and such an engine's parts shall be
                gc.freeze()  # half a million objects of torch: walking them would stall the loop for a tenth of a second
        elif state == "failed":
            on_failed(_reason(name, target.failure, ready), ready)

    if not on_demand:
        return make(changed)
    target = OnDemandEngine(
        name=name, make=make, settings=bounds, card=card, plan=plan, eager=settings.load == "startup",
        idle_unload_s=settings.idle_unload_s, on_state=lambda state: changed(target, state),
    )  # fmt: skip
    return target


def _loader(engine: EnginePlan, device: str, model_id: str) -> Callable[..., Any]:
    """What reads the model, for the chosen engine; it takes `progress`."""
    settings, plan = engine.settings, engine.plan
    sizes = {"dtype": settings.dtype, "max_seq_len": plan.max_seq_len, "num_blocks": plan.num_blocks, "model_id": model_id}
    sizes["max_num_seqs"] = engine.max_num_seqs
    try:
        if engine.choice.nano:
            from laya.model import nanovllm

            return partial(nanovllm.load, engine.path, enforce_eager=settings.enforce_eager, **sizes)
        from laya.model.load import load
    except ImportError as exc:  # a package of a version that lacks a name we need
        raise dependencies.unfit(exc) from None
    return partial(
        load, engine.path, device=device, block_size=engine.choice.block_tokens,
        threads=settings.threads or max(1, (os.cpu_count() or 2) - 1), swap_bytes=0 if device == "cpu" else settings.swap_space,
        prefill_chunk_tokens=settings.prefill_chunk_tokens, eager=settings.enforce_eager, **sizes,
    )  # fmt: skip


def _tokenizer(engine: EnginePlan) -> Any:
    from laya.model.load import read_tokenizer

    return read_tokenizer(engine.path)


def _bounds(engine: EnginePlan) -> EngineSettings:
    names = (
        "max_concurrent_prefills", "prefill_chunk_tokens", "queue_limit", "queue_tokens", "queue_timeout_s",
        "step_timeout_s", "max_prompt_tokens",
    )  # fmt: skip
    return EngineSettings(max_num_seqs=engine.max_num_seqs, **{name: getattr(engine.settings, name) for name in names})


def _reason(name: str, failure: BaseException | None, served: bool) -> StartError:
    """Why an engine ended, in one line: the package at fault where there is one."""
    if isinstance(failure, DeviceLost):
        return DeviceGone(f"engine {name}: the GPU is lost: {failure}")
    if isinstance(failure, StartError):
        return failure
    if failure is None:
        return EngineDied(f"engine {name} failed")
    text = f"engine {name} failed: {type(failure).__name__}; its log has the place"
    return EngineDied(text) if served else dependencies.blame(failure) or ConfigError(text)
