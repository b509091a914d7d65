"""The parts of benchmarks/stages.py."""
