"""Benchmarks behind ``edgesplit bench``: docs/benchmarks.md says what each figure is and how it is measured."""
