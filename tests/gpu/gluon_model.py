"""A model of Hopper as Gluon shows it: runs a kernel's source on a CPU.

Partitions of warps are threads. Copies arrive late and in any order; a product reads its operands
when it is issued or when it is waited for. So a barrier that is missing, or waited for in the wrong
phase, shows in the results or as a wait that never ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from threading import Condition, Thread, local
from time import sleep
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PANEL = 64
"""16-bit elements of a swizzled row."""
PATIENCE_S = 20.0
LAG_S = 0.002


class Stuck(Exception):
    """A barrier that nobody completes."""


@dataclass
class Pointer:
    memory: Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Any = True, other: Any = 0) -> Any:
        return self.memory[int(self.offset)].long() if mask else torch.as_tensor(other)

    def store(self, value: Tensor, mask: Tensor) -> None:
        where = torch.as_tensor(mask).expand(value.shape)
        self.memory[self.offset.expand(value.shape)[where]] = value[where].to(self.memory.dtype)


@dataclass
class Memory:
    """Shared memory. A matrix wider than a panel lies panel by panel."""

    flat: Tensor
    shape: list[int]
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    def index(self, i: Any) -> Memory:
        n = prod(self.shape[1:])
        assert 0 <= i < self.shape[0]
        return Memory(self.flat[int(i) * n : (int(i) + 1) * n], self.shape[1:])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        assert prod(shape) == self.flat.numel()
        assert dtype == self.dtype
        return Memory(self.flat, list(shape))

    def permute(self, order: list[int]) -> Memory:
        assert order == [1, 0]
        return Memory(self.flat, self.shape, transposed=True)

    def matrix(self) -> Tensor:
        """A view [rows, panels, columns of a panel], or [..., columns] of a single panel."""
        if self.shape[-1] <= PANEL:
            return self.flat.view(self.shape)
        rows, columns = self.shape
        return self.flat.view(columns // PANEL, rows, PANEL).transpose(0, 1)

    def load(self, layout: Any = None) -> Tensor:
        value = self.matrix().reshape(self.shape).clone()
        return value.T if self.transposed else value

    def store(self, value: Tensor) -> None:
        view = self.matrix()
        view.copy_(value.to(self.dtype).reshape(view.shape))


@dataclass
class Barrier:
    changed: Condition
    count: int = 0
    pending: int = 0
    n_bytes: int = 0
    parity: int = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, n_bytes: int = 0) -> None:
        with self.changed:
            assert self.pending > 0, "more arrivals than expected"
            self.pending -= 1
            self.n_bytes += n_bytes
            self._complete()

    def received(self, n_bytes: int) -> None:
        with self.changed:
            self.n_bytes -= n_bytes
            self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.n_bytes == 0:
            self.parity ^= 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, parity: Any, pred: Any = True) -> None:
        if pred:
            with self.changed:
                if not self.changed.wait_for(lambda: self.parity != int(parity), PATIENCE_S):
                    raise Stuck


@dataclass
class Product:
    a: Any
    b: Memory
    acc: Tensor | None
    value: Tensor | None = None

    def compute(self) -> None:
        if self.value is None:
            a = self.a.load() if isinstance(self.a, Memory) else self.a
            self.value = a.float() @ self.b.load().float()
            if self.acc is not None:
                self.value = self.acc + self.value


@dataclass
class Copy:
    source: TensorDescriptor
    at: list[int]
    ready: Barrier
    target: Memory

    def arrive(self) -> None:
        """What lies outside of the tensor arrives as zeros."""
        box = torch.zeros(self.source.block_shape, dtype=self.target.dtype)
        spans = [
            (max(first, 0), min(first + n, size), first)
            for first, n, size in zip(self.at, box.shape, self.source.shape, strict=True)
        ]
        if all(start < stop for start, stop, _ in spans):
            inside = tuple(slice(start - first, stop - first) for start, stop, first in spans)
            there = tuple(slice(start, stop) for start, stop, _ in spans)
            source = self.source.base.as_strided(self.source.shape, self.source.strides)
            box[inside] = source[there]
        assert self.target.shape == list(box.shape)
        self.target.store(box)
        self.ready.received(box.numel() * box.element_size())


@dataclass
class Program:
    """One program of a launch."""

    number: int
    programs: int
    rng: random.Random
    changed: Condition = field(default_factory=Condition)
    copies: list[Copy] = field(default_factory=list)
    issued: local = field(default_factory=local)
    failures: list[BaseException] = field(default_factory=list)
    done: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)

    def language(self) -> dict[str, Any]:
        """What a kernel's module imports, by name."""
        return {
            "gl": SimpleNamespace(
                program_id=lambda axis: self.number,
                num_programs=lambda axis: self.programs,
                static_range=range,
                arange=lambda start, stop, layout: torch.arange(start, stop),
                full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
                where=lambda c, a, b: torch.where(*map(torch.as_tensor, (c, a, b))),
                maximum=lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
                minimum=lambda a, b: torch.minimum(*map(torch.as_tensor, (a, b))),
                max=lambda x, axis: x.amax(axis),
                sum=lambda x, axis: x.sum(axis),
                exp2=torch.exp2,
                convert_layout=lambda x, layout, assert_trivial=False: x,
                load=lambda at, **how: at.load(**how),
                store=lambda at, value, **how: at.store(value, **how),
                allocate_shared_memory=self.allocate,
                warp_specialize=self.specialize,
                int64=torch.int64,
                float32=torch.float32,
                SliceLayout=gl.SliceLayout,
                BlockedLayout=gl.BlockedLayout,
                DotOperandLayout=gl.DotOperandLayout,
                NVMMASharedLayout=_SharedLayout,
            ),
            "mbarrier": SimpleNamespace(
                init=lambda barrier, count: barrier.init(count),
                expect=lambda barrier, n_bytes: barrier.arrive(n_bytes),
                arrive=self.arrive,
                wait=lambda barrier, parity, pred=True: barrier.wait(parity, pred),
                MBarrierLayout=lambda: None,
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait,
        }

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype is torch.int64:
            barriers = [Barrier(self.changed) for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: barriers[int(i)])
        return Memory(torch.full((prod(shape),), torch.nan, dtype=dtype), list(shape))

    def arrive(self, barrier: Barrier) -> None:
        """Others may be a long way on before this thread is."""
        barrier.arrive()
        if self.rng.random() < 0.1:
            sleep(LAG_S)

    def copy(self, source: TensorDescriptor, at: list[Any], ready: Barrier, to: Memory) -> None:
        with self.changed:
            self.copies.append(Copy(source, [int(i) for i in at], ready, to))
            self.changed.notify_all()

    def bring_copies(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.copies or self.done)
                if not self.copies:
                    return
                copy = self.copies.pop(self.rng.randrange(len(self.copies)))
            copy.arrive()

    def multiply(
        self, a: Any, b: Memory, acc: Tensor, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        product = Product(a, b, acc if use_acc else None)
        if self.rng.random() < 0.5:
            product.compute()
        self.issued.__dict__.setdefault("products", []).append(product)
        return product

    def wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        products = self.issued.products
        while len(products) > outstanding:
            products.pop(0).compute()
        values = [x.value if isinstance(x, Product) else x for x in deps]
        return values[0] if len(values) == 1 else tuple(values)

    def specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        threads = [Thread(target=self.guard, args=(f, args)) for f, args in partitions]
        copier = Thread(target=self.bring_copies)
        for thread in (copier, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        with self.changed:
            self.done = True
            self.changed.notify_all()
        copier.join()
        if self.failures:
            raise self.failures[0]

    def guard(self, part: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            part(*args)
        except BaseException as e:
            self.failures.append(e)

    def translate(self, thing: Any) -> Any:
        """Of a kernel's global: the same in this model."""
        if isinstance(thing, gl.constexpr):
            return thing.value
        if not isinstance(thing, GluonJITFunction):
            return thing
        if thing not in self.memo:
            names: dict[str, Any] = {}
            function = FunctionType(
                thing.fn.__code__, names, thing.fn.__name__, thing.fn.__defaults__
            )
            self.memo[thing] = function
            for name, value in thing.fn.__globals__.items():
                names[name] = self.translate(value)
            names.update(self.language())
        return self.memo[thing]


class _SharedLayout:
    def __init__(self, *shape: Any) -> None:
        pass

    @classmethod
    def get_default_for(cls, shape: list[int], dtype: torch.dtype) -> _SharedLayout:
        return cls()


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(
            torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0),
            x.storage_offset(),
        )
    if isinstance(x, TensorDescriptor):
        x.dtype = x.base.dtype  # type: ignore[attr-defined]
        return x
    return torch.as_tensor(x) if isinstance(x, int) else x


@dataclass
class Launcher:
    """Stands for a kernel: `launcher[grid](...)` runs its programs one after the other."""

    kernel: GluonJITFunction
    seed: int = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, maxnreg: int, launch_pdl: bool, **fixed: Any
        ) -> None:
            values = [_argument(x) for x in args]
            for number in range(grid[0]):
                program = Program(number, grid[0], random.Random(self.seed + number))
                program.translate(self.kernel)(*values, **fixed)

        return launch
