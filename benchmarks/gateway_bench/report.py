"""The figures as tables for people."""

from __future__ import annotations

from gateway_bench.figures import TARGETS, Medians, met, number, table

LOAD_COLUMNS = (("rps", "req/s"), ("p50_us", "p50 us"), ("p99_us", "p99 us"), ("cpu_us", "CPU us/req"), ("errors", "errors"))
STEADY_COLUMNS = (("p50_us", "p50 us"), ("p99_us", "p99 us"), ("late_p99_us", "sent late p99 us"), ("errors", "errors"))
STREAM_COLUMNS = (
    ("frame_p50_us", "frame p50 us"), ("frame_p99_us", "frame p99 us"), ("ttft_p50_us", "first frame p50 us"),
    ("cpu_us", "CPU us/frame"), ("errors", "errors"),
)  # fmt: skip
SYSTEM_COLUMNS = (("start_s", "start s"), ("resident_ready_mib", "MiB ready"), ("resident_loaded_mib", "MiB after load"))
DENSE_COLUMNS = (("per_frame_us", "us/frame"), ("cpu_us", "CPU us/frame"), ("errors", "errors"))
COLUMNS = {"steady": STEADY_COLUMNS, "stream": STREAM_COLUMNS, "stream_dense": DENSE_COLUMNS}
TITLES = {"steady": "Constant rate", "stream": "Streams, paced", "stream_dense": "Streams, frames without a pause"}


def render(result: dict) -> str:
    """`result` as gateway.py prints it with --json."""
    machine = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}; {packages}; "
        f"wrk {result['wrk']}; load before: {machine['load_before']}\n{result['method']}",
    ]
    parts += [f"Skipped: {name}: {why}" for name, why in result["skipped"].items()]
    parts.append("Systems\n" + _systems(result["systems"]))
    parts += [_point(point, systems) for point, systems in result["figures"].items()]
    parts.append("Ratios\n" + _ratios(result["ratios"]))
    return "\n\n".join(parts)


def _systems(systems: dict[str, dict]) -> str:
    rows = [["system", "version", *(title for _, title in SYSTEM_COLUMNS)]]
    for name, told in systems.items():
        rows.append([name, told["version"], *(number(told.get(key)) for key, _ in SYSTEM_COLUMNS)])
    return table(rows)


def _point(point: str, systems: Medians) -> str:
    columns = COLUMNS.get(point, LOAD_COLUMNS)
    rows = [["system", *(title for _, title in columns)]]
    rows += [[name, *(number(run.get(key)) for key, _ in columns)] for name, run in systems.items()]
    return f"{TITLES.get(point) or title(point)}\n{table(rows)}"


def title(point: str) -> str:
    """c64_16k -> 64 connections, 16 KB prompts."""
    connections, *rest = point[1:].split("_")
    size, by = "16 KB" if "16k" in rest else "200-byte", ", by hey" if "hey" in rest else ""
    return f"{connections} connection{'' if connections == '1' else 's'}, {size} prompts{by}"


def _ratios(ratios: dict[str, float | None]) -> str:
    rows = [["ratio", "measured", "target", "met"]]
    for name, value in ratios.items():
        target = " ".join((TARGETS[name][0], number(TARGETS[name][1]))) if name in TARGETS else ""
        if value is not None or target:
            rows.append([name, number(value), target, met(name, value)])
    return table(rows)
