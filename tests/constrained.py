"""Ways to make the kernel refuse things to this process: called in a process of its own, since none can be taken back."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import struct
from errno import EINVAL
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REMOUNT, _MS_REC, _MS_PRIVATE = 32, 16384, 1 << 18
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_FLOCK = {"x86_64": 73, "aarch64": 32}
_CAPABILITY_VERSION, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 0x20080522, 1, 2


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def obey_permissions() -> None:
    """Obey files' permissions as their owner must, also as root."""
    if os.geteuid() != 0:
        return
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, sets))
    effective, *rest = struct.unpack("6I", sets.raw)
    effective &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    _check(_libc.capset(header, ctypes.create_string_buffer(struct.pack("6I", effective, *rest))))


def refuse_locks(errno: int) -> None:
    """Have the kernel answer every `flock` with an error, as it does on a file system that has none."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    load_number, jump_equal, answer = 0x20, 0x15, 0x06
    code = [
        (load_number, 0, 0, 0),
        (jump_equal, 0, 1, _FLOCK[platform.machine()]),
        (answer, 0, 0, 0x00050000 | errno),
        (answer, 0, 0, 0x7FFF0000),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = Program(len(code), ctypes.addressof(filters))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)))


class SmallDisk:
    """A folder in which only so many bytes can be written: a file system in memory that only this process sees.

    Where the system lets nobody mount, no file can grow beyond that length instead; `is_disk` says which it is.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Make it."""
        self._folder = os.fsencode(folder)
        self.is_disk = True
        try:
            _check(_libc.unshare(_CLONE_NEWNS if os.geteuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER))
            _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
            _check(_libc.mount(b"none", self._folder, b"tmpfs", 0, f"size={num_bytes}".encode()))
        except OSError:
            self.is_disk = False
            self.resize(num_bytes)

    def leave(self, num_bytes: int) -> None:
        while True:
            try:
                return self.resize(shutil.disk_usage(self._folder).used + num_bytes)
            except OSError as error:  # smaller than what was written a moment ago
                if error.errno != EINVAL:
                    raise

    def resize(self, num_bytes: int) -> None:
        if self.is_disk:
            _check(_libc.mount(b"none", self._folder, b"tmpfs", _MS_REMOUNT, f"size={num_bytes}".encode()))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
