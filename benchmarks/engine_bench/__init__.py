"""Parts of `benchmarks/engine.py` and `benchmarks/mixed.py`."""
