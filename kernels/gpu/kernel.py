"""Launching a kernel often, from Python, in little time.

Triton binds and specialises the arguments of every launch, which takes several times as long as the
launch itself. Here the variant that an earlier launch with such arguments compiled is found by a
key and launched as it is. A step with prompt tokens launches some three hundred kernels so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import triton
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

Grid = tuple[int, ...]
_Decorator = Callable[[Callable[..., Any]], Any]


def kernel(**options: Any) -> _Decorator:
    """`triton.jit(**options)` for what is launched from the host, not called by another kernel."""
    return _launched(triton.jit(**options))


def gluon_kernel(**options: Any) -> _Decorator:
    """The same for `gluon.jit`."""
    return _launched(gluon.jit(**options))


def _launched(compiler: _Decorator) -> _Decorator:
    def decorate(function: Callable[..., Any]) -> Any:
        jit = compiler(function)
        return jit if knobs.runtime.interpret else Kernel(jit)

    return decorate


class Kernel:
    """Launched as `kernel[grid](*arguments, **constants_and_options)`. Tensors and run-time numbers
    are positional arguments, constants keywords, in every launch."""

    noting: ClassVar[bool] = False
    """Nothing is launched: what an earlier engine of this process compiled would read what others,
    only noted (see compile_ahead.py), have not written."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if Kernel.noting:
                self.warmup(*arguments, grid=grid, **options)
                return
            key = (*map(_kind, arguments), *options.items())
            variant = self._variants.get(key)
            if variant is not None:
                variant.launch(grid, arguments)
                return
            compiled = self.jit[grid](*arguments, **options)
            self._variants[key] = _Variant(compiled, self._constants(len(arguments), options))

        return launch

    def warmup(self, *arguments: Any, grid: Grid, **options: Any) -> Any:
        """Compile without a launch."""
        return self.jit.warmup(*arguments, grid=grid, **options)

    def _constants(self, n_given: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """Values of the parameters after the first `n_given`, which a compiled variant is given
        too."""
        return tuple(options.get(param.name, param.default) for param in self.jit.params[n_given:])


class _Variant:
    """Compiled code and what a launch of it needs beside the arguments. Without Triton's hooks for
    profilers, which see the first launch of a variant only."""

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._run = compiled.run
        self._code = compiled.function, compiled.packed_metadata, None, None, None
        self._constants = constants
        self._device = driver.active.get_current_device()

    def launch(self, grid: Grid, arguments: tuple[Any, ...]) -> None:
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(self._device)
        self._run(x, y, z, stream, *self._code, *arguments, *self._constants)


def _kind(argument: Any) -> object:
    """What Triton tells arguments apart by: a tensor's type and whether it is aligned to 16 bytes,
    a number's width and whether it is 1 or a multiple of 16, a tensor map's type and box."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, TensorDescriptor):  # its layout follows from these
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, bool) or not isinstance(argument, int):
        return argument if argument is None else type(argument)
    if argument == 1:
        return 1
    return argument % 16 == 0, -(2**31) <= argument < 2**31
