"""Parts of benchmarks/gateway.py: the systems compared, the loads put on them, and the arithmetic of the figures."""
