"""Locks, cached properties and threads that stay usable after a fork or an interrupted start.

A forked child copies the parent's locks but only the forking thread, so a lock held by another thread at that moment stays
held in the child for ever. Locks that outlive one iteration are therefore `ForkSafeLock`, and values that threads compute
lazily use this module's `cached_property`: before Python 3.12, the standard library's holds a lock while it computes.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")


class ForkSafeLock:
    """A lock that is free in a forked child, whichever thread of the parent held it.

    Use it only for work that may be done twice: the child sees whatever the parent's thread had done so far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = -1
        with _forking:
            _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = -1
        self._lock.release()

    def renew(self) -> None:
        """Free the lock in a child, unless the forking thread itself holds it (a signal handler forked)."""
        if self._holder != threading.get_ident():
            self._lock, self._holder = threading.Lock(), -1


_LOCKS: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()
_forking = threading.RLock()  # two threads may fork at the same time, and one may make a lock meanwhile


def _after_in_child() -> None:
    _forking.release()
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_in_child)


@contextmanager
def without_collections() -> Iterator[None]:
    """Let no garbage be collected, and no child be forked, which would stay so: a look at all that torch has takes 90 ms."""
    with _forking:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class OwnerProcess:
    """The process that made an object. A forked child has a copy of the object, but not its threads, locks and children."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """True except in a process that was forked from the owner."""
        return self.pid == os.getpid()


class cached_property(Generic[T]):  # noqa: N801 - named as the standard library's
    """A property computed on first use and stored in the instance. Takes no lock: two threads may both compute it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        # the first result wins, so that all threads see the same object
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value


# ------------------------------------------------------------------------------------------------------------- joinable thread
# A thread that can be joined whatever has become of its start, which Ctrl-C may interrupt.


class JoinableThread(threading.Thread):
    """A daemon thread whose `join` never fails because it has not started, and leaves none that runs its target later.

    A `KeyboardInterrupt` in `Thread.start` leaves open whether the thread runs, and `Thread.join` raises a `RuntimeError` then.
    """

    def __init__(self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._turn = threading.Lock()
        self._is_started = self._is_running = self._is_cancelled = False

    def start(self) -> None:
        """Start the thread; as `Thread.start`."""
        super().start()
        self._is_started = True

    def run(self) -> None:
        """Call the target, unless `join` was called before and `start` has not returned."""
        with self._turn:
            if self._is_cancelled:
                return
            self._is_running = True
        super().run()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends. If `start` has not returned and the target does not run, it never will."""
        if not self._is_started:
            with self._turn:
                if not self._is_running:
                    self._is_cancelled = True
                    return
        super().join(timeout)
