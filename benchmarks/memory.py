"""Planned against measured peak memory of a real server, under the worst load that its settings allow.

    python benchmarks/memory.py [--json] [--quick] [--model FILE]

For each setting a server is started, its plan read from /metrics, and its engine filled: every sequence at the end of the
window, sampled with log-probabilities, prompts scored, an answer held to a grammar, the queue full behind them. The peak is
the process's VmHWM less what an empty interpreter holds. The plan is compared in the parts that such a load can fill: buffers,
connections, stored conversations and the session table are bounds that clients would have to fill one by one. On a GPU the
host's parts are compared so, and the card's peak is reported beside its plan.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]

from serving import Served, empty_process  # noqa: E402

DEFAULT_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# Bounds, not use: this load does not fill them, and they are reported beside the comparison.
UNFILLED = ("buffers", "connections", "store", "sessions", "cache", "backends")
DEVICE = ("params", "kv", "activation", "runtime")
SETTINGS = {
    "window 1024, 4 sequences": {"max_seq_len": 1024, "max_num_seqs": 4},
    "window 512, 16 sequences": {"max_seq_len": 512, "max_num_seqs": 16},
    "window 2048, 2 sequences, chunks of 1024": {"max_seq_len": 2048, "max_num_seqs": 2, "prefill_chunk_tokens": 1024},
}


def random_model(folder: Path) -> Path:
    """A Qwen3-shaped model of 120 M random bf16 weights: other parts of the plan weigh most than in SmolLM2."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    layers, hidden, inner, heads, kv, dim, vocab = 12, 768, 2304, 12, 4, 64, 32000
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim,
        "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu", "bos_token_id": vocab - 2, "eos_token_id": vocab - 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (heads * dim, hidden), at + "self_attn.k_proj.weight": (kv * dim, hidden),
            at + "self_attn.v_proj.weight": (kv * dim, hidden), at + "self_attn.o_proj.weight": (hidden, heads * dim),
            at + "self_attn.q_norm.weight": (dim,), at + "self_attn.k_norm.weight": (dim,),
            at + "mlp.gate_proj.weight": (inner, hidden), at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    torch.manual_seed(0)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()
    }
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    letters, base = "etaoinshrdlu", sorted(ByteLevel.alphabet())
    longer = ("".join(word) for length in (2, 3, 4, 5) for word in itertools.product(letters, repeat=length))
    words = list(itertools.islice(longer, vocab - len(base) - 2))  # each is a shorter one and a letter, as merges make them
    numbers = {word: i for i, word in enumerate([*base, *words])}
    tokenizer = Tokenizer(BPE(numbers, [(word[:-1], word[-1]) for word in words]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    return folder


def measure(model: Path, settings: dict, seconds: float) -> dict:
    """One setting: bytes by part, the peak, and their ratio."""
    config = {"inference": {"model": str(model), "name": "m", "queue_limit": 64, **settings}}
    with Served(config) as server:
        server.ready()
        window, sequences = settings["max_seq_len"], settings["max_num_seqs"]
        after_start = server.memory()["VmHWM"]
        load(server, window, sequences, seconds)
        peak, metrics = server.memory()["VmHWM"], server.metrics()
    planned = {name: int(value) for name, value in metrics.items() if name.startswith("laya_plan_bytes{")}
    parts = {name.split('part="')[1].rstrip('"}'): size for name, size in planned.items()}
    card = metrics.get('laya_gpu_memory_bytes{gpu="0",kind="peak"}')
    apart = UNFILLED if card is None else (*UNFILLED, *DEVICE)
    plan = sum(size for part, size in parts.items() if part not in apart)
    above = peak - empty_process()
    on_card = {} if card is None else {"card_plan_bytes": sum(parts[part] for part in DEVICE), "card_peak_bytes": int(card)}
    return {
        **on_card, "plan_bytes": plan, "peak_bytes": above, "ratio": above / plan, "peak_after_start": after_start,
        "parts": parts,
        "not_compared": {part: parts[part] for part in UNFILLED if part in parts},
        "generated_tokens": metrics.get('laya_tokens_total{engine="local",kind="generated"}', 0.0),
    }  # fmt: skip


def load(server: Served, window: int, sequences: int, seconds: float) -> None:
    """First the pool full to the end of the window, then scored prompts and a full queue until the time is up."""
    until = time.monotonic() + seconds
    filling = {"max_tokens": 40, "logprobs": 5, "temperature": 1.0, "top_p": 0.99, "ignore_eos": True}
    _run(server, [[{**filling, "prompt": _tokens(window - 40, seed)}] for seed in range(sequences)])
    question = [{"role": "user", "content": "JSON"}]
    structured = {"messages": question, "max_tokens": 16, "response_format": {"type": "json_object"}}
    _run(server, [[structured]], allowed=(200, 400))  # 400: a base model has no chat template
    scoring = {"prompt": _tokens(window - 8, 99), "max_tokens": 1, "echo": True, "logprobs": 5}
    _run(server, [[scoring], [scoring]])
    lanes = []
    for lane in range(max(12, 2 * sequences)):
        length = (window - 40, 16, window // 2)[lane % 3]
        body = {"max_tokens": 32, "logprobs": 5 * (lane % 2), "temperature": 1.3, "ignore_eos": True, "n": 1 + lane % 2}
        lanes.append([{**body, "prompt": _tokens(length, lane * 1000 + i)} for i in range(200)])
    _run(server, lanes, until)


def _tokens(count: int, seed: int) -> list[int]:
    return [5 + (seed * 7919 + i * 31) % 200 for i in range(max(1, count))]


def _run(
    server: Served, lanes: list[list[dict]], until: float | None = None, allowed: tuple[int, ...] = (200, 429, 503)
) -> None:
    """Each lane is a client that sends its bodies one after another, until the time is up. Raises for other statuses."""
    strange: list[int] = []

    def client(bodies: list[dict]) -> None:
        for body in bodies:
            if until is not None and time.monotonic() > until:
                return
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            try:
                sent = json.dumps({"model": "m", **body})
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                connection.request("POST", path, sent, {"content-type": "application/json"})
                response = connection.getresponse()
                response.read()
                if response.status not in allowed:
                    strange.append(response.status)
            finally:
                connection.close()

    threads = [threading.Thread(target=client, args=(bodies,)) for bodies in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if strange:
        raise RuntimeError(f"the load was answered with {strange}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="five seconds of load a setting instead of thirty")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    arguments = parser.parse_args()
    if not arguments.model.exists():
        print(f"skipped: {arguments.model} is not there (laya pull default)", file=sys.stderr)
        return 0
    seconds = 5.0 if arguments.quick else 30.0
    results = {}
    for name, settings in SETTINGS.items():
        results[f"{arguments.model.name}: {name}"] = measure(arguments.model, settings, seconds)
    with tempfile.TemporaryDirectory() as folder:
        random = random_model(Path(folder))
        results["random Qwen3 shape, bf16: window 1024, 4 sequences"] = measure(
            random, {"max_seq_len": 1024, "max_num_seqs": 4}, seconds
        )
    ratios = {f"plan_vs_peak: {name}": round(result["ratio"], 4) for name, result in results.items()}
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "settings": results, "ratios": ratios}, indent=2))
    else:
        for name, result in results.items():
            plan, peak = result["plan_bytes"] >> 20, result["peak_bytes"] >> 20
            print(f"{name}\n  plan {plan} MiB, peak {peak} MiB: {result['ratio']:.1%}")
    return 1 if any(ratio > 1.0 for ratio in ratios.values()) else 0  # more than was planned is a fault, a loose plan a finding


if __name__ == "__main__":
    raise SystemExit(main())
