"""Benchmarks of fusedaccum: one file a question, one harness, the public API only."""
