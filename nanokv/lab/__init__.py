"""Instruments that use the library from outside: benchmarks, fault injection, studies, traces and
comparisons."""
