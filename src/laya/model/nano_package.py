"""The nano-vllm package, opened as Laya needs it: which of its parts are replaced, and why. CUDA, one engine a process.

In: a model folder and sizes that the memory plan has worked out. Out: its `LLMEngine`, constructed, and keys for its prefix
cache. The upstream package and its fork on PyPI are told apart by what they have, never by name. Engine thread only.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from laya.errors import ConfigError, DependencyError
from laya.model.nano_fit import BLOCK_TOKENS, graph_slots
from laya.model.spec import ModelSpec

log = logging.getLogger("laya.model")

_KEY_BYTES = 8  # the package keeps a key as a 64-bit number
_in_use = threading.Lock()  # held while an engine of the package is open: it has global state (process group, context)


class Package:
    """The modules that are used of it. Raises DependencyError where the package or what it stands on is missing."""

    def __init__(self) -> None:
        try:
            from nanovllm import config
            from nanovllm.engine import llm_engine, model_runner, sequence
            from nanovllm.sampling_params import SamplingParams
            from nanovllm.utils import context
        except ImportError as error:
            raise DependencyError(f"nano-vllm cannot be imported: {error}; `engine: torch` does without it") from None
        self.config = config
        self.llm_engine = llm_engine
        self.model_runner = model_runner
        self.Sequence = sequence.Sequence
        self.SamplingParams = SamplingParams
        self.context: Callable[[], Any] = context.get_context

    def open(
        self, path: str, spec: ModelSpec, *, window: int, num_blocks: int, max_num_seqs: int, enforce_eager: bool,
        dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        """Its `LLMEngine`: weights on the device, a pool of `num_blocks` blocks, warmed up. Raises ConfigError for a second."""
        if not _in_use.acquire(blocking=False):
            raise ConfigError("one engine of nano-vllm a process; give the others `engine: torch`")
        default_dtype = torch.get_default_dtype()
        try:
            with self._replaced(spec, num_blocks, dtype):
                engine = self.llm_engine.LLMEngine(
                    path, max_num_batched_tokens=window, max_num_seqs=graph_slots(max_num_seqs), max_model_len=window,
                    enforce_eager=enforce_eager, kvcache_block_size=BLOCK_TOKENS, tokenizer=_NoTokenizer(),
                )  # fmt: skip
        except BaseException:
            self.forget()
            raise
        finally:  # it sets both for the whole process, and leaves a device mode behind that every later call would pass
            torch.set_default_device(None)
            torch.set_default_dtype(default_dtype)
        atexit.unregister(engine.exit)  # the engine thread closes it, in its own time
        return engine

    def close(self, engine: Any) -> None:
        try:
            engine.exit()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of what the package keeps for the process: its process group, and tables that it caches."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        _in_use.release()

    @contextlib.contextmanager
    def _replaced(self, spec: ModelSpec, num_blocks: int, dtype: torch.dtype | None) -> Iterator[None]:
        runner = self.model_runner
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (self.config, "AutoConfig", _PlainConfigs(self.config.AutoConfig, spec, dtype)),
                (runner, "dist", _OwnGroup(runner.dist)),
                (runner, "print", log.debug),  # the fork talks to standard output
                (runner.ModelRunner, "allocate_kv_cache", _planned_pool(spec, num_blocks)),
            ):
                stack.enter_context(_swapped(owner, name, value))
            yield


@contextlib.contextmanager
def _swapped(owner: ModuleType | type, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class _NoTokenizer:
    """Laya tokenises and decides where an answer ends. Upstream reads its own all the same."""

    eos_token_id = -1


class _PlainConfigs:
    """In place of AutoConfig: rotary settings and type where every version of the package looks for them.

    transformers 5 has moved both, and the package would take its own default for the base, or trip over the new form.
    """

    def __init__(self, auto_config: Any, spec: ModelSpec, dtype: torch.dtype | None) -> None:
        self._auto_config = auto_config
        self._spec = spec
        self._dtype = dtype

    def from_pretrained(self, path: str) -> _PlainConfig:
        return _PlainConfig(self._auto_config.from_pretrained(path), self._spec, self._dtype)


class _PlainConfig:
    def __init__(self, config: Any, spec: ModelSpec, dtype: torch.dtype | None) -> None:
        self._config = config
        self.rope_theta, self.rope_scaling = spec.rope.base, None
        self.head_dim = spec.head_dim
        found = dtype or getattr(config, "dtype", None) or torch.bfloat16
        found = getattr(torch, found) if isinstance(found, str) else found
        # flash-attn takes 16 bits; some folders say float32 beside weights of 16.
        self.dtype = self.torch_dtype = torch.bfloat16 if found is torch.float32 else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _OwnGroup:
    """In place of torch.distributed: a group of one process that meets itself in memory, not on a fixed TCP port."""

    def __init__(self, distributed: ModuleType) -> None:
        self._distributed = distributed

    def init_process_group(self, backend: str, *_: Any, **__: Any) -> None:
        real = self._distributed
        known = backend if real.is_backend_available(backend) else "gloo"
        real.init_process_group(known, store=real.HashStore(), rank=0, world_size=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed, name)


def _planned_pool(spec: ModelSpec, num_blocks: int) -> Callable[[Any], None]:
    """In place of the package's own sizing, which takes what it finds free: exactly the blocks that were planned."""

    def allocate_kv_cache(runner: Any) -> None:
        runner.config.num_kvcache_blocks = num_blocks
        shape = (2, spec.layers, num_blocks, BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
        runner.kv_cache = torch.zeros(shape)  # by the package's defaults of device and type; touched, so that it is resident
        attentions = [module for module in runner.model.modules() if hasattr(module, "k_cache") and hasattr(module, "v_cache")]
        for attention, keys, values in zip(attentions, *runner.kv_cache, strict=True):
            attention.k_cache, attention.v_cache = keys, values

    return allocate_kv_cache


class PrefixKeys:
    """Keys of the package's prefix cache: by tenant, made with a secret, and none for what must be computed anew.

    Put on a block manager, it takes the place of `compute_hash`. Its own key is a plain hash of tokens: it knows no tenants,
    and a clever prompt could be made to collide with another's. `rules(package sequence)` gives (salt, how many of its first
    blocks may come from the cache). The last known token is never served from it: with nothing left to compute the package
    fails, or answers with a token of a neighbour.
    """

    def __init__(self, manager: Any, rules: Callable[[Any], tuple[bytes, int]]) -> None:
        self._rules = rules
        self._secret = os.urandom(hashlib.blake2b.MAX_KEY_SIZE)
        self._salt, self._shareable, self._seen = b"", 0, 0
        for name in ("can_allocate", "allocate", "may_append", "hash_blocks"):  # not every version has all of them
            if hasattr(manager, name):
                setattr(manager, name, self._entering(getattr(manager, name), looks_up=name.endswith("allocate")))
        manager.compute_hash = self.key

    def _entering(self, method: Callable[..., Any], looks_up: bool) -> Callable[..., Any]:
        def call(sequence: Any, *arguments: Any) -> Any:
            self._salt, shareable = self._rules(sequence)
            # Blocks are looked up from the first on, and offered one by one later.
            whole = sequence.num_tokens // BLOCK_TOKENS
            self._shareable = shareable if looks_up else whole
            self._seen = 0
            return method(sequence, *arguments)

        return call

    def key(self, token_ids: list[int], prefix: int = -1) -> int:
        self._seen += 1
        made = hashlib.blake2b(key=self._secret, digest_size=_KEY_BYTES)
        if self._seen > self._shareable:
            made.update(os.urandom(_KEY_BYTES))  # found by nobody
        made.update(b"first" + self._salt if prefix == -1 else b"after" + prefix.to_bytes(_KEY_BYTES, "little"))
        made.update(array("q", token_ids).tobytes())
        return int.from_bytes(made.digest(), "little")
