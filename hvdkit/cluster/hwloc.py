"""Binds MPI's calls of hwloc to MPI's own copy.

Open MPI and TensorFlow's ``libtensorflow_framework.so`` each contain a copy of hwloc, and export more than a hundred
functions with the same names. Both call them through lazy bindings: the dynamic linker resolves a function at its first
call, first in the global scope and then in the caller's dependencies. ``import tensorflow`` adds TensorFlow's copy to
the global scope.

If MPI was loaded first, the functions called by ``MPI_Init`` are bound to MPI's copy, but ``MPI_Finalize`` binds the
remaining ones, including ``hwloc_topology_destroy``, to TensorFlow's copy. That function receives a topology with
another layout and crashes in ``hwloc__topology_disadopt`` (observed with three or more ranks on a host, which share one
topology). Adding MPI's copy to the global scope as well does not help: TensorFlow then calls it, and finds no NUMA
nodes (``Call to hwloc_topology_set_flags() failed``). ``LD_BIND_NOW=1`` resolves all functions at load time, but must
be set before the process starts. :func:`bind_hwloc` does the same in a running process, for hwloc only.

If TensorFlow was loaded first, all of MPI's calls go to TensorFlow's copy, which works.

Supports glibc on x86_64 and aarch64, the Linux platforms with TensorFlow wheels. Sources: the System V ABI, chapter 5
(dynamic section); its supplements for both processors (``R_*_JUMP_SLOT``); glibc's ``link.h``.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

PREFIX = b"hwloc_"
TENSORFLOW = "libtensorflow_framework.so"

# Tags of the dynamic section.
_PLTRELSZ = 2
_STRTAB = 5
_SYMTAB = 6
_STRSZ = 10
_PLTREL = 20
_JMPREL = 23
_BIND_NOW = 24
_FLAGS = 30
_FLAGS_1 = 0x6FFFFFFB
_RELA = 7
_FLAG_NOW = 8
_FLAG_1_NOW = 1
_JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}.get(platform.machine())
_RTLD_DI_LINKMAP = 2


class _LinkMap(ctypes.Structure):
    """``struct link_map`` of ``link.h``: a loaded library."""


_LinkMap._fields_ = [
    ("address", ctypes.c_size_t),
    ("name", ctypes.c_char_p),
    ("dynamic", ctypes.POINTER(ctypes.c_size_t)),
    ("next", ctypes.POINTER(_LinkMap)),
]


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_uint32),
        ("kind", ctypes.c_uint16),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


class _Relocation(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("info", ctypes.c_uint64), ("addend", ctypes.c_int64))


def bind_hwloc() -> int:
    """Bind the hwloc calls of every library loaded before TensorFlow to that library's own copy.

    Returns:
        The number of bindings; 0 if MPI with a lazily bound hwloc was not loaded before TensorFlow.
    """
    count = 0
    for path in libraries():
        if TENSORFLOW in Path(path).name:
            break
        slots = lazy_slots(path)
        if slots:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            for name, slot in slots.items():
                slot.value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            count += len(slots)
    return count


def libraries() -> list[str]:
    """Return the paths of the loaded libraries in load order; empty without glibc."""
    return [os.fsdecode(library.name) for library in _link_maps() if library.name]


def lazy_slots(path: str) -> dict[str, ctypes.c_size_t]:
    """Return the slot in which the library at ``path`` stores the address of each hwloc function, by function name.

    Empty for a library that does not call hwloc, or that was linked to bind at load time (its slots are read-only).
    """
    library = next((library for library in _link_maps() if library.name and os.fsdecode(library.name) == path), None)
    if library is None or _JUMP_SLOT is None:
        return {}
    dynamic = _dynamic_section(library)
    is_bound = _BIND_NOW in dynamic or dynamic.get(_FLAGS, 0) & _FLAG_NOW or dynamic.get(_FLAGS_1, 0) & _FLAG_1_NOW
    if is_bound or dynamic.get(_PLTREL) != _RELA or not dynamic.get(_JMPREL):
        return {}
    names = ctypes.string_at(dynamic[_STRTAB], dynamic[_STRSZ])
    if PREFIX not in names:
        return {}
    symbols = ctypes.cast(dynamic[_SYMTAB], ctypes.POINTER(_Symbol))
    relocations = (_Relocation * (dynamic[_PLTRELSZ] // ctypes.sizeof(_Relocation))).from_address(dynamic[_JMPREL])
    slots = {}
    for relocation in relocations:
        start = symbols[relocation.info >> 32].name
        if relocation.info & 0xFFFFFFFF == _JUMP_SLOT and names.startswith(PREFIX, start):
            name = names[start : names.index(b"\0", start)].decode()
            slots[name] = ctypes.c_size_t.from_address(library.address + relocation.offset)
    return slots


def _link_maps() -> Iterator[_LinkMap]:
    """Yield the loaded libraries, the program first."""
    program = ctypes.CDLL(None)
    if platform.libc_ver()[0] != "glibc":
        return
    link_map = ctypes.POINTER(_LinkMap)()
    if program.dlinfo(ctypes.c_void_p(program._handle), _RTLD_DI_LINKMAP, ctypes.byref(link_map)) != 0:
        return
    while link_map:
        yield link_map.contents
        link_map = link_map.contents.next


def _dynamic_section(library: _LinkMap) -> dict[int, int]:
    """Return the dynamic section's values by tag, with absolute addresses.

    glibc has relocated the addresses in it, except for the kernel's library (the vDSO).
    """
    section = {}
    index = 0
    while tag := library.dynamic[index]:
        section[tag] = library.dynamic[index + 1]
        index += 2
    for tag in (_STRTAB, _SYMTAB, _JMPREL):
        if tag in section and section[tag] < library.address:
            section[tag] += library.address
    return section
