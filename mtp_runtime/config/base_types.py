"""Scalar types of the cluster files, and the base of every type: unknown keys refused, no coercion."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from .addresses import malformed


def _visible(text: str) -> str:
    """A text of which every character is seen: a byte order mark inside a path would only show when nothing is found.

    Errors: PydanticCustomError, named after the pattern because it is what a pattern of editors cannot say.
    """
    for char in text:
        if not char.isprintable():
            message = f"should hold visible characters only, not U+{ord(char):04X}"
            raise PydanticCustomError("string_pattern_visible", "{reason}", {"reason": message})
    return text


def _no_template(text: str) -> str:
    """A password as it is typed: Ansible would work out a template. Errors: PydanticCustomError, as above."""
    if any(mark in text for mark in ("{{", "{%", "{#")) or not text.isprintable():
        message = "should hold visible characters only and no template ({{ {% {#)"
        raise PydanticCustomError("string_pattern_password", "{reason}", {"reason": message})
    return text


def _well_formed(text: str) -> str:
    """An address that can be one: 10.20.0.300 would be looked up as a name. Errors: PydanticCustomError, as above."""
    found = malformed(text)
    if found:
        raise PydanticCustomError("string_pattern_address", "{reason}", {"reason": found})
    return text


Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=100_000_000)]
TEXT_PATTERN = r"^[^\x00-\x1f\x7f{}]*$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
ADDRESS_PATTERN = r"^[A-Za-z0-9:][A-Za-z0-9.:-]*$"
# What the patterns ask for, in words.
PATTERN_WORDS = {
    TEXT_PATTERN: "should have no control characters and no braces (templates are not read here)",
    NAME_PATTERN: "should be letters, digits and . _ / - only, a letter or digit first, without spaces",
    ADDRESS_PATTERN: "should be an IP address or a host name: letters, digits and . : - only, without spaces",
}
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=TEXT_PATTERN), AfterValidator(_visible)]
# A name that becomes part of file names, labels and command lines.
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME_PATTERN)]
Address = Annotated[str, Field(min_length=1, max_length=253, pattern=ADDRESS_PATTERN), AfterValidator(_well_formed)]

# Never shown: problems.is_secret knows its keys by their names.
Password = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_no_template)]


class Strict(BaseModel):
    """Base of every type: unknown keys refused, no coercion, values cannot change after the check."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
