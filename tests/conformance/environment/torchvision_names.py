"""In place of torchvision, whose package does not import beside this torch build: names only, nothing works.

vLLM's model runner imports it for images, which no test here has.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.0"
__path__: list[str] = []


class _Absent(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **kwargs):
        raise RuntimeError("torchvision is not installed here")


class Absent(metaclass=_Absent):
    pass


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType):
        module.__getattr__ = _attribute


def _attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent


__getattr__ = _attribute
sys.meta_path.append(_Finder())
