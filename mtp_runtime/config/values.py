"""The value of a key of the cluster files, as text: for messages and for what explains a plan."""

import json

from pydantic import BaseModel

from .problems import KeyPath
from .schema import Cluster

MOST = 60


def value_at(cluster: Cluster, key: KeyPath) -> str:
    """What a key has: JSON, shortened; empty where there is no such key or it has keys of its own."""
    found: object = cluster
    for part in key:
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, BaseModel) and str(part) in type(found).model_fields:
            found = getattr(found, str(part))
        else:
            return ""
    return "" if isinstance(found, BaseModel | dict) else shown(found)


def shown(value: object) -> str:
    """A value as the files would have it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."
