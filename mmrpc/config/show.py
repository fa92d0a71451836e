"""A resolved config as data: each value with where it came from, and its JSON Schema."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrpc.config.cluster import ClusterConfig
from mmrpc.config.secrets import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrpc.config.models import Model
    from mmrpc.config.origin import Key


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a config.

    Attributes:
        key: Dotted name.
        value: The value that holds; hidden if its name says that it is secret.
        source: ``default``, ``--set``, or file, line and column.
    """

    key: str
    value: Any
    source: str


def settings(cluster: ClusterConfig) -> list[Setting]:
    """Lists every value in the order of the models, safe to print."""
    return list(_walk(mask(cluster.model_dump(mode="json")), (), cluster))


def _walk(node: Any, key: Key, cluster: ClusterConfig) -> Iterator[Setting]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _walk(value, (*key, name), cluster)
        return
    place = cluster.origin.places.get(key)
    yield Setting(".".join(key), node, str(place) if place else "default")


def json_schema() -> dict[str, Any]:
    """Builds the JSON Schema of a config file, for editors."""
    schema = ClusterConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # The loader fills these in from the first node.
    schema["required"].remove("master")
    schema["$defs"]["MasterConfig"].pop("required")
    models = {model.__name__: model for model in _models()}
    for name, part in {**schema["$defs"], "ClusterConfig": schema}.items():
        described = _attribute_docs(models[name])
        part["description"] = inspect.getdoc(models[name]).split("\n")[0]  # type: ignore[union-attr]
        for key, value in part["properties"].items():
            value["description"] = described[key]
    return schema


def _models() -> Iterator[type[Model]]:
    from mmrpc.config import models

    yield ClusterConfig
    for value in vars(models).values():
        if isinstance(value, type) and issubclass(value, models.Model):
            yield value


def _attribute_docs(model: type[Model]) -> dict[str, str]:
    """Reads the ``Attributes`` of a docstring, so that they are written once."""
    text = (inspect.getdoc(model) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}
