"""Lets vLLM run its model runner V2 on a CPU: Triton's interpreter stands in for the backend that its kernels need.

    PYTHONPATH=scripts/benchmarks/triton_on_cpu python ...       # imported at every start of Python

Every kernel of V2 then runs as NumPy, line by line: slow, and exact. Nothing of vLLM is changed.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


def _use_interpreter() -> None:
    try:
        from triton import backends
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:  # a Python without Triton, such as that of a command beside
        return

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver, compiler = Driver, None

    backends.backends["cpu"] = Backend
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask):  # the kernel of n-grams gives numbers, which a GPU takes as well
        mask.data = mask.data.astype(bool)
        return mask

    def create_masked_load(self, pointers, mask, *rest):
        return load(self, pointers, as_bool(mask), *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        return store(self, pointers, value, as_bool(mask), *rest)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


_use_interpreter()
