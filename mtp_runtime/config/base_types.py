"""Scalar types of the cluster files, and the base of every type: unknown keys refused, no coercion."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=100_000_000)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f{}]*$")]  # no templates
# A name that becomes part of file names, labels and command lines.
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
Address = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:-]*$")]


class Strict(BaseModel):
    """Base of every type: unknown keys refused, no coercion, values cannot change after the check."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
