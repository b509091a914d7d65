"""Packages that Laya stands on: the versions it was tested with, and one line for whatever is wrong with one.

In: names of the chain a role needs. Out: nothing, or DependencyError naming package, installed and tested version and the
command that mends it. Called at start, before anything listens.
"""

from __future__ import annotations

import importlib
from importlib import metadata

from laya.errors import DependencyError

# import name -> (distribution, tested version). constraints.txt pins the same; a test compares them.
ROUTER = {
    "uvloop": ("uvloop", "0.23.0"),
    "h11": ("h11", "0.16.0"),
    "orjson": ("orjson", "3.13.0"),
    "msgspec": ("msgspec", "0.23.0"),
    "ahocorasick": ("pyahocorasick", "2.3.1"),
    "yaml": ("PyYAML", "6.0.4"),
    "prometheus_client": ("prometheus_client", "0.26.0"),
    "zstandard": ("zstandard", "0.25.0"),
}
ENGINE = {
    "numpy": ("numpy", "2.4.6"),
    "torch": ("torch", "2.13.0"),
    "tokenizers": ("tokenizers", "0.23.3"),
    "gguf": ("gguf", "0.19.0"),
    "jinja2": ("Jinja2", "3.1.6"),
    "safetensors": ("safetensors", "0.8.0"),
    "psutil": ("psutil", "7.2.2"),
}
# Used where they are installed; nothing is imported before it is needed.
OPTIONAL = {
    "nanovllm": ("nano-vllm-fork", "20260210"),
    "transformers": ("transformers", "5.24.0"),  # nano-vllm's
    "llguidance": ("llguidance", "1.9.1"),
    "redis": ("redis", "8.1.0"),
    "re2": ("google-re2", "1.1.20251105"),
}
EXTRA = "pip install 'laya-server[engine]'"


def check(chain: dict[str, tuple[str, str]]) -> None:
    """Import every package of the chain in order. Raises DependencyError for the first that fails."""
    for name in chain:
        try:
            importlib.import_module(name)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt | SystemExit):
                raise
            raise explain(name, chain[name], exc) from None


def explain(name: str, tested: tuple[str, str], exc: BaseException, when: str = "at import") -> DependencyError:
    distribution, version = tested
    installed = installed_version(distribution)
    if isinstance(exc, ModuleNotFoundError) and exc.name == name:
        mend = EXTRA if name in ENGINE else f"pip install '{distribution}=={version}'"
        return DependencyError(f"{distribution} is not installed (tested: {version}); install it with: {mend}")
    text = " ".join(str(exc).split())[:200]
    return DependencyError(
        f"{distribution} {installed or '(no version found)'} fails {when}: {type(exc).__name__}: {text}; "
        f"tested: {version}; mend it with: pip install --force-reinstall '{distribution}=={version}'"
    )


def unfit(exc: ImportError) -> DependencyError:
    """A package imports, but lacks something that our own modules import from it."""
    name = (exc.name or "").partition(".")[0]
    known = {**ROUTER, **ENGINE}
    return explain(name, known[name], exc) if name in known else DependencyError(f"an import fails: {exc}")


def blame(exc: BaseException) -> DependencyError | None:
    """The package in whose code an exception arose, if it is one of ours to know; None when it is not."""
    known = {**ROUTER, **ENGINE}
    trace = exc.__traceback__
    culprit = None
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package in known:
            culprit = package
        elif package == "laya":
            culprit = None  # our own code called back: the fault may be ours
        trace = trace.tb_next
    return None if culprit is None else explain(culprit, known[culprit], exc, "when the engine starts")


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
