"""Throughput of this machine with one model: step by step, stage by stage, beside its peers. bench.py is the flow."""
