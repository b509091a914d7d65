"""From what was measured to the ratios and their targets: plain arithmetic on medians."""

from __future__ import annotations

from statistics import median

from gateway_bench.figures import divide, scaled

# (sign, target) of performance, at the same threads on the same file.
TARGETS: dict[str, tuple[str, float]] = {
    "decode_1_vs_llamacpp": (">=", 1.0),
    "decode_8_vs_llamacpp": (">=", 1.5),
    "prefill_vs_llamacpp": (">=", 1.5),
    "decode_vs_transformers": (">=", 6.0),
    "gateway_p99_ms": ("<=", 2.0),
    "gateway_p99_vs_straight": ("<=", 4.0),
    "engine_loss": ("<=", 0.1),
}

Samples = dict[str, list[float]]  # by name, one a round


def medians(samples: Samples) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items() if values}


def engine_ratios(found: dict[str, float]) -> dict[str, float | None]:
    """Ours over theirs in tokens/s; for the time to the first token below 1 is better. None where a peer is missing.

    Ours comes through HTTP always. llama.cpp's lone decode and prefill are llama-bench's, without a server: the harder way.
    """

    def over(ours: str, theirs: str) -> float | None:
        return divide(found.get(ours), found.get(theirs))

    return {
        "decode_1_vs_llamacpp": over("laya_decode_1", "llama_bench_decode"),
        "decode_1_vs_llama_server": over("laya_decode_1", "llama_server_decode_1"),
        "decode_8_vs_llamacpp": over("laya_decode_8", "llama_server_decode_8"),
        "prefill_vs_llamacpp": over("laya_prefill", "llama_bench_prefill"),
        "decode_vs_transformers": over("laya_decode_1", "transformers_decode"),
        "ttft_vs_llama_server": over("laya_ttft_s", "llama_server_ttft_s"),
    }


def mixed_ratios(found: dict[str, float]) -> dict[str, float | None]:
    """`found`: p99 of both paths in us while the engine decodes, tokens/s of the engine alone and under the load."""
    kept = divide(found.get("engine_loaded"), found.get("engine_alone"))
    return {
        "gateway_p99_ms": scaled(found.get("gateway_p99_us"), 1e-3),
        "gateway_p99_vs_straight": divide(found.get("gateway_p99_us"), found.get("straight_p99_us")),
        "engine_loss": None if kept is None else 1 - kept,
    }


def met(name: str, value: float | None) -> str:
    """`yes`, `no`, or "" where there is no target or no figure."""
    if value is None or name not in TARGETS:
        return ""
    sign, target = TARGETS[name]
    return "yes" if (value >= target if sign == ">=" else value <= target) else "no"


def verdicts(ratios: dict[str, float | None]) -> list[list[str]]:
    """Rows of a table: ratio, value, target, met."""
    rows = [["ratio", "value", "target", "met"]]
    for name, value in ratios.items():
        target = " ".join(map(str, TARGETS[name])) if name in TARGETS else ""
        rows.append([name, "-" if value is None else f"{value:.3g}", target, met(name, value)])
    return rows
