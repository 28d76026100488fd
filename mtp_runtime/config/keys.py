"""The keys of the cluster files by path, from the schema: which there are, and what type each has."""

from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from .problems import KeyPath
from .schema import Cluster


def keys_at(path: KeyPath) -> list[str]:
    """Keys that a place may have; [] where it has none, or any (host names)."""
    found = _inner(path)
    return list(found.model_fields) if isinstance(found, type) and issubclass(found, BaseModel) else []


def type_at(path: KeyPath) -> Any:
    """The type of a key's value with its limits; None for an unknown key. path starts with a section or `hosts`."""
    parent = _inner(path[:-1])
    if isinstance(parent, type) and issubclass(parent, BaseModel):
        field = parent.model_fields.get(str(path[-1]))
        if field is None:
            return None
        return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return get_args(parent)[1] if get_origin(parent) is dict else None


def elsewhere(path: KeyPath) -> str:
    """The one key of mtp.yml or model.yml with the last name of a path that is no key; '' without one."""
    found = [section for section in ("mtp", "model") if path[-1] in keys_at((section,))]
    return f"{found[0]}.{path[-1]}" if len(found) == 1 and path[0] != found[0] else ""


def _inner(path: KeyPath) -> Any:
    """The model or the dict type at a path; None where there is neither."""
    found: Any = Cluster
    for part in path:
        if get_origin(found) is dict:
            found = _container(get_args(found)[1])
        elif found is not None and str(part) in found.model_fields:
            found = _container(found.model_fields[str(part)].annotation)
        else:
            return None
    return found


def _container(annotation: Any) -> Any:
    """The model or dict in `X`, `X | None` and `Annotated[X, ...]`."""
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return annotation
    for kind in get_args(annotation):
        found = _container(kind)
        if found is not None:
            return found
    return None
