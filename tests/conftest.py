"""For all tests: python, torchrun and the rest are those of the environment that runs pytest."""

import os
import sys
from pathlib import Path

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
