"""Benchmarks of fusedaccum: one file per question, one harness, the public API only."""
