"""The CPU's kernels: compiled by numba, one call per step for all threads of a team."""
