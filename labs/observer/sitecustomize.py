"""Python imports this file when it starts, because labs/check.py put its folder on PYTHONPATH.

It waits for `import torch` and then runs hooks/watch.py, or the hooks that CHECK_HOOKS names. It
imports nothing that Python has not loaded by now, and is alone in its folder: another module here
could hide one of the script's.
"""

import os
import sys


class AfterTorch:
    """A finder that lets the others find torch, and has the hooks run after it."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next(filter(None, specs), None)
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_watch(module):
                load(module)
                watch()

            spec.loader.exec_module = load_and_watch
        return spec


def watch():
    """Run the hooks as a module of a name that nobody else has."""
    name = os.environ.get("CHECK_HOOKS", "watch.py")
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hooks", name)
    module = type(sys)("_labs_check_watch")
    module.__file__ = path
    sys.modules[module.__name__] = module
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)


if "CHECK_DIR" in os.environ:
    sys.meta_path.insert(0, AfterTorch())

# Another sitecustomize on the path would have been imported in this one's place.
_here = os.path.dirname(os.path.abspath(__file__))
for _folder in sys.path:
    _other = os.path.join(_folder, "sitecustomize.py")
    if os.path.abspath(_folder) != _here and os.path.isfile(_other):
        with open(_other) as _file:
            exec(compile(_file.read(), _other, "exec"), {"__name__": "sitecustomize"})
        break
