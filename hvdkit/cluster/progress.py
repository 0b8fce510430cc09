"""Progress of this rank: its step and current collective, recorded for its sentinel and for a profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Literal

from hvdkit.watchdog.flight_recorder import EAGER, collective_key, recorder

if TYPE_CHECKING:
    from hvdkit.profiling.recorder import Recorder

_LIBRARIES = ("hvdkit", "tensorflow", "keras", "horovod")
_GENERATED = ("/autograph_generated", "__autograph_generated", "/contextlib.py")


class Progress:
    """Progress of a rank.

    Attributes:
        flight: records its collectives and steps.
        key: identifies the last collective across ranks: the participating ranks, and its number among theirs.
        profile: records some steps, if ``HVDKIT_PROFILE`` is set; else None.
    """

    def __init__(self) -> None:
        self.flight = recorder()
        self.key = ""
        self.profile: Recorder | None = None
        self._counts: dict[tuple[int, ...] | None, int] = {}

    def begin_world(self) -> None:
        """Number collectives from 1 again: ``hk.init()`` was called again, on all ranks."""
        self._counts.clear()
        self.flight.begin_world()

    def begin(self, name: str, ranks: Sequence[int] | None, nbytes: int) -> int:
        """Record that this thread begins a collective among ``ranks`` (None: all ranks); return its number."""
        group = None if ranks is None else tuple(ranks)
        number = self._counts[group] = self._counts.get(group, 0) + 1
        self.key = collective_key(f"{EAGER}{number}", group)
        self.flight.in_thread()
        if self.profile is not None:
            self.profile.begin_collective(name)
        return self.flight.begin(self.key, name, source_line(), group, nbytes, eager=True)

    def end(self, number: int) -> None:
        """Record that a collective has ended."""
        self.flight.end(number, eager=True)
        if self.profile is not None:
            self.profile.end_collective()

    def at_step(self, step: int) -> None:
        """Record the number of steps trained. Called by the training thread."""
        self.flight.at_step(step)
        self.flight.in_thread()
        if self.profile is not None:
            self.profile.at_step(step)

    def count_step(self, step: int) -> None:
        """Note the number of steps trained, for metrics, in a program that has no Supervisor."""
        if self.flight.step is None:
            self.flight.notes.at_step(step)

    def end_profile(self, *, finish: bool) -> None:
        """Stop recording; with ``finish``, merge the records of all ranks, all of which must call it."""
        profile = self.profile
        self.profile = None
        if profile is not None:
            (profile.finish if finish else profile.give_up)()


@cache
def progress() -> Progress:
    """Return the :class:`Progress` of this process."""
    return Progress()


_NO_SPAN: AbstractContextManager[None] = nullcontext()


def spending(kind: Literal["input", "save"]) -> AbstractContextManager[None]:
    """Record in the profile what the training thread spends its time on inside the context."""
    profile = progress().profile
    return _NO_SPAN if profile is None else profile.span(kind)


@contextmanager
def collective(name: str, ranks: Sequence[int] | None = None, nbytes: int = 0) -> Iterator[None]:
    """Record a collective among ``ranks`` (default: all) that begins and ends with the context.

    The coordinator compares ranks by the number of collectives begun. So all of ``ranks`` must enter the context in the
    same order: after arguments and threads have been checked, just before the message is sent.
    """
    number = progress().begin(name, ranks, nbytes)
    try:
        yield
    finally:
        progress().end(number)


def source_line() -> str:
    """Return the innermost source line of the calling thread outside of hvdkit, TensorFlow, Keras and Horovod."""
    innermost = sys._getframe(1)
    frame: FrameType | None = innermost
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@cache
def is_user_file(file: str) -> bool:
    """Return True for a source file outside of hvdkit, TensorFlow, Keras and Horovod."""
    return not file.startswith(_folders()) and not any(part in file for part in _GENERATED)


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of the installed libraries, because a user's folder may have the same name."""
    folders = list(filter(None, map(folder_of, _LIBRARIES)))
    return tuple(f"{folder}/" for folder in {*folders, *map(os.path.realpath, folders)})


def folder_of(package: str) -> str | None:
    """Return the folder of an installed package, or None."""
    try:
        spec = find_spec(package)
    except ValueError:  # a module without a file
        return None
    return None if spec is None or spec.origin is None else os.path.dirname(spec.origin)  # noqa: PTH120
