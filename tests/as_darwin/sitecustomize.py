"""Python imports this at its start where this folder is in PYTHONPATH: the process takes itself for one of macOS."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("skypool_as_darwin", Path(__file__).parents[1] / "darwin.py")
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.install()
