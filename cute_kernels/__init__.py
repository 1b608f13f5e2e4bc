"""CuTe-DSL kernels for Hopper (SM90): the fused expert-parallel forward and what it shares with the backward.

Importing this package imports neither the DSL nor CUDA; the modules that hold kernels import `cutlass` themselves.
"""


def is_available() -> bool:
    """Whether `nvidia-cutlass-dsl` can be imported. Neither imports it nor touches a GPU."""
    from importlib.util import find_spec

    return find_spec("cutlass") is not None or find_spec("nvidia_cutlass_dsl") is not None
