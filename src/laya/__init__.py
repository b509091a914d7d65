"""Laya: an LLM router and an in-process inference engine, in one process."""

__version__ = "0.1.0"
