"""Instruments that look at the library from outside: benchmarks, faults, studies, traces, comparisons."""
