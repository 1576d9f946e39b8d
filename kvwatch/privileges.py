"""Gives up what a monitor has no use for. Nothing here asks for more than the process was started with.

A plain user keeps what it has, which is little; root keeps two capabilities of some forty: reading other
users' files and looking into their processes. Both are given up for good, and no program that kvwatch could
be made to start gets them back (no_new_privs, see prctl(2) and capabilities(7)).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection

from kvwatch.observe.host import DAC_READ_SEARCH, SYS_PTRACE

DAC_OVERRIDE = 1
"""Writing to other users' files and folders."""
NEEDED = (DAC_READ_SEARCH, SYS_PTRACE)

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def is_root() -> bool:
    """Whether the process may do anything that its capabilities let it."""
    return os.geteuid() == 0


def drop_privileges(keep: Collection[int] = NEEDED) -> None:
    """Keep these capabilities at most, and never gain others.

    To be called before the first thread starts, as each thread has its own.

    Raises:
        OSError: the kernel, or a seccomp filter, refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = _Header(_CAPABILITY_VERSION_3, 0)
    sets = (_Sets * 2)()
    _check(libc.capget(ctypes.byref(header), sets))
    for index, words in enumerate(sets):
        mask = sum(1 << (number % 32) for number in keep if number // 32 == index)
        words.effective &= mask
        words.permitted &= mask
        words.inheritable = 0
    _check(libc.capset(ctypes.byref(header), sets))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
