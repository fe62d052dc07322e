"""What `benchmarks.kernels` times: one module a part, each with ``cells() -> list[Cell]``."""
