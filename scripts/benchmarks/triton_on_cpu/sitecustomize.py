"""Lets vLLM run its model runner V2 on a CPU: Triton's interpreter stands in for the backend that its kernels need.

    PYTHONPATH=scripts/benchmarks/triton_on_cpu python ...       # imported at every start of Python

Every kernel of V2 then runs as NumPy, line by line: slow, and exact. Of vLLM one line is undone: its platform of CPUs
switches off asynchronous scheduling, which GPUs have.
"""

import importlib.abc
import importlib.machinery
import os
import sys

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


class _KeepAsync(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Leaves asynchronous scheduling as it was asked for, once vLLM's platform of CPUs is imported."""

    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        self._spec = importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.machinery.ModuleSpec(name, self, origin=self._spec.origin)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__file__ = self._spec.origin
        self._spec.loader.exec_module(module)
        update = module.CpuPlatform.check_and_update_config.__func__

        def check_and_update_config(cls, config):
            wanted = config.scheduler_config.async_scheduling
            update(cls, config)
            config.scheduler_config.async_scheduling = wanted

        module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


_use_interpreter()
sys.meta_path.insert(0, _KeepAsync())
