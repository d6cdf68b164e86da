"""Tests of Ekiden."""

import os
import sys

# Some images forbid bytecode; each process of the tests would then compile all of Ekiden, and all
# tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
