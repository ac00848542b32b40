"""Lets tests import the scripts of benchmarks/ as these import each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
