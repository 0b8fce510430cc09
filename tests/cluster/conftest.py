"""These tests compare seconds: they need the machine's slowdown, which the runner has measured."""

import os

import speed

if speed.VARIABLE not in os.environ:
    os.environ[speed.VARIABLE] = str(speed.measure())
