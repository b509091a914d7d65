"""Structs of the section `inference`: the model of this process, or several in `inference.engines`. Data only."""

from __future__ import annotations

from typing import Annotated, Literal

from laya.config.section import GIB, MIB, TIB, Name, Section, about, size

DEFAULT_MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
_DAY_S = 86_400
_MAX_TOKENS = 100_000_000
_LISTEN = r"unix:/?[^\s?#]+|https?://[^\s/?#]+[^\s?#]*"


class WatchdogConfig(Section, kw_only=True):
    """Marks at which the engine protects the machine, as shares of the memory limit in force."""

    soft: Annotated[float, about("past it nothing new is admitted", gt=0, le=1)] = 0.92
    hard: Annotated[float, about("past it the newest sequences are ended", gt=0, le=1)] = 0.97
    gpu_temperature_c: Annotated[float, about("degrees at which nothing new is admitted", ge=30, le=120)] = 90.0


class EngineConfig(Section, kw_only=True):
    """One model, and what it may use."""

    engine: Annotated[
        Literal["auto", "torch", "nano-vllm"], about("auto: nano-vllm where it, CUDA and a fitting model are, else torch")
    ] = "auto"
    model: Annotated[
        str, about("a GGUF file, or a folder with safetensors; relative paths are taken from this file's folder")
    ] = DEFAULT_MODEL
    dtype: Annotated[
        Literal["auto", "quantized", "bfloat16", "float32"],
        about("auto: weights as the file holds them; bfloat16: dequantised; float32: exact, slower, twice the memory or more"),
    ] = "auto"
    name: Annotated[str | None, about("the id shown in /v1/models; null: from the file's name")] = None
    listen: Annotated[
        str | None,
        about("role engine: where it listens; role router: where `local` is", pattern=_LISTEN, form="unix:PATH or an http URL"),
    ] = None
    listen_key: Annotated[
        str | None,
        about("bearer token that routers send to `listen`; null: whoever reaches it is taken for a router of ours",
              pattern=r"[!-~]{1,512}", form="visible ASCII without spaces, never empty", secret=True),
    ] = None  # fmt: skip
    load: Annotated[Literal["startup", "on_demand"], about("when the weights are read")] = "startup"
    idle_unload_s: Annotated[
        float | None, about("free the weights after so long idle; null: never", gt=0, le=366 * _DAY_S)
    ] = None
    max_seq_len: Annotated[
        int | None, about("window, prompt and answer together; null: the model's, or what memory allows", ge=16, le=_MAX_TOKENS)
    ] = None
    max_num_seqs: Annotated[int, about("sequences that run at the same time; each needs KV memory", ge=1, le=4096)] = 4
    gpu_memory_utilization: Annotated[
        float, about("share of the card, or on the CPU of the available memory, that may be used at most", gt=0, le=1)
    ] = 0.85
    reserve: Annotated[int, size("left free on the device whatever the share says", 0, 16 * TIB)] = 1 * GIB
    kv_cache: Annotated[
        Literal["auto"] | int, size("KV pool, made once; auto: max_num_seqs whole windows, or what fits", 1 * MIB, 16 * TIB)
    ] = "auto"
    swap_space: Annotated[
        int, size("host memory for the KV of preempted sequences (a plain number is GiB); no effect on the CPU", 0, 16 * TIB,
                  plain="GiB")
    ] = 0  # fmt: skip
    enforce_eager: Annotated[
        bool, about("no compiled step on the CPU, no captured graphs in nano-vllm: slower, operation by operation")
    ] = False
    max_concurrent_prefills: Annotated[
        int, about("prompts being read at the same time; each adds to the peak of memory", ge=1, le=4096)
    ] = 1
    prefill_chunk_tokens: Annotated[
        int, about("prompt tokens a step reads at most, so that running answers go on", ge=16, le=1_000_000)
    ] = 512
    max_prompt_tokens: Annotated[int | None, about("cap on input besides the window; null: none", ge=1, le=_MAX_TOKENS)] = None
    queue_limit: Annotated[
        int, about("requests waiting; beyond it 429. An empty queue always takes one", ge=0, le=1_000_000)
    ] = 64
    queue_tokens: Annotated[int, about("prompt tokens waiting; beyond it 429", ge=0, le=_MAX_TOKENS)] = 65_536
    queue_timeout_s: Annotated[float, about("longest wait in the queue; then 503", gt=0, le=_DAY_S)] = 30.0
    step_timeout_s: Annotated[float, about("a step that takes longer counts as stuck", gt=0, le=_DAY_S)] = 120.0
    threads: Annotated[int | None, about("CPU threads; null: the cores less one, which the server keeps", ge=1, le=1024)] = None
    fit: Annotated[
        Literal["refuse", "shrink"], about("a plan that does not fit: refuse to start, or shrink window and sequences")
    ] = "refuse"
    tool_calls: Annotated[
        Literal["auto", "hermes", "llama3", "mistral", "none"],
        about("how the model writes tool calls; auto: told from its chat template; none: calls are left in the text"),
    ] = "auto"
    decision_temperature: Annotated[
        float,
        about("for /v1/systemone: above 1 evens probabilities out, below 1 sharpens them, as calibration found", gt=0, le=100),
    ] = 1.0  # fmt: skip
    decision_calibration: Annotated[
        str | None,
        about('for /v1/systemone: JSON file of such figures by type, {"noul": 1.3, "choice": 1.6, "score": 1.4}; null: none'),
    ] = None  # fmt: skip
    decision_options: Annotated[
        int | None,
        about("for /v1/systemone: longest list of options that is read; of more, all are compared by name and so many of the "
              "likeliest read; null: 16 on the CPU, all on a GPU", ge=2, le=255),
    ] = None  # fmt: skip
    watchdog: Annotated[WatchdogConfig, about("when to protect the machine")] = WatchdogConfig()


class InferenceConfig(EngineConfig, kw_only=True):
    """One model, or several under `engines` and nothing beside them."""

    engines: Annotated[
        dict[Name, EngineConfig],
        about("several models instead of one, each with the keys above and a target of its name; one shared limit"),
    ] = {}
