"""Errors as one paragraph for the terminal."""

from __future__ import annotations

import re
from argparse import ArgumentError

from lightning_fabric.utilities.exceptions import MisconfigurationException

from fedclust.federation.errors import FederationError
from fedclust.launch.hints import with_hint

_EXPECTED = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    ModuleNotFoundError,
    MisconfigurationException,
    FederationError,
)
_GIVEN = re.compile(r"Given value type:.*?Given value: (?P<value>.*?)$", re.DOTALL | re.MULTILINE)
_UNION = re.compile(r"Does not validate against any of the Union subtypes\s+Subtypes: .*?\s+Errors:")
_NOISE = re.compile(r"- Expected a <class 'NoneType'>\.?|- Expected a path but .* either not accessible or invalid")
_LITERAL = re.compile(r"typing\.Literal\[(.*?)\]")
_LONGEST_VALUE = 80


def explain(error: BaseException) -> str:
    """One paragraph on an error, without a traceback."""
    if "tensorboard" in str(error).lower() and "not met" in str(error):
        return "trainer.logger: TensorBoardLogger needs tensorboard: pip install 'fedclust[tensorboard]', or CSVLogger"
    if isinstance(error, ArgumentError) or _UNION.search(str(error)):
        return with_hint(tidy_parser_error(str(error)))
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and "loading state_dict" in text:
        first = text.partition("size mismatch for ")[2].partition(" size mismatch for ")[0] or text
        return f"the checkpoint does not fit this model: {first.rstrip(' .')}"
    if isinstance(error, MisconfigurationException):
        hint = "; trainer.accelerator cpu always works" if "backend found" in text else ""
        return f"trainer: {text}{hint}"
    if isinstance(error, _EXPECTED) and text:
        return with_hint(text)
    return f"unexpected {type(error).__name__}: {text} (FEDCLUST_DEBUG=1 or --debug shows where)"


def tidy_parser_error(text: str) -> str:
    """One paragraph for what the parser says in nested lists: keys down to the wrong one, what may be, the value."""
    given = _GIVEN.search(text)
    value = "" if given is None else given["value"].strip()
    if given is not None:
        text = text[: given.start()]
    text = _NOISE.sub("", _UNION.sub("", text))
    text = re.sub(r"Problem with given class_path '([^']*)':", r"\1:", text)
    text = re.sub(r'Parser key "([^"]*)":', r"\1:", text)
    text = re.sub(r"<class '([^']*)'>", r"\1", _LITERAL.sub(r"one of \1", text))
    text = re.sub(r"Expected an? ", "expected ", text).replace("Got value:", "Got")
    text = re.sub(r"expected dot import path string: ([^;\n]+)", r"there is no class \1, give its import path", text)
    text = re.sub(r"(^|:)(\s*-\s+)+", r"\1 ", text)
    text = re.sub(r"\s+-\s+", "; ", text)
    text = " ".join(text.split()).rstrip(" ;.")
    first, *others = text.split("; ")
    text = "; ".join([first, *(other for other in dict.fromkeys(others) if other not in first)])
    if value and "Got " not in text and len(value) <= _LONGEST_VALUE and "(" not in value:
        text = f"{text}. Got {value}"
    return text
