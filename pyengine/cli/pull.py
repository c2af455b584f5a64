"""`pyengine pull`: fetches a model by name into the user's cache."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pyengine.cli import options
from pyengine.models.hub import cache_folder, known_names
from pyengine.models.hub import pull as fetch


def pull(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(known_names())}, or org/name of the hub.")
    ],
    as_json: options.Json = False,
) -> None:
    """Fetch a model once, check it, and print where it lies.

    Models lie in ~/.cache/pyengine (XDG_CACHE_HOME and PYENGINE_CACHE are honoured); those of the
    Hugging Face hub in the hub's own cache.
    """
    with options.progress_bar(name) as progress:
        path = fetch(name, progress, verify=True)
    print(
        json.dumps({"name": name, "path": str(path), "cache": str(cache_folder())})
        if as_json
        else path
    )
