"""What an object was made with, for the record of a run and for people."""

from __future__ import annotations

import inspect
import reprlib
from typing import Any


class Described:
    """A class whose constructor keeps its arguments as attributes of the same names."""

    def describe(self) -> dict[str, Any]:
        """Class name and those arguments that were kept, as plain values for the record of a run."""
        names = inspect.signature(type(self).__init__).parameters
        return {"class": type(self).__name__, "args": {name: vars(self)[name] for name in names if name in vars(self)}}

    def __repr__(self) -> str:
        """The call that makes such an object; long values are cut."""
        described = self.describe()
        arguments = (f"{name}={reprlib.repr(value)}" for name, value in described["args"].items())
        return f"{described['class']}({', '.join(arguments)})"
