"""spformat backends: which can run here, and what the others miss."""

from __future__ import annotations

from typing import Any

from .options import Json
from .output import console, print_json
from .tables import table

EPILOG = "spformat backends --json"


def run(as_json: Json = False) -> None:
    """Every backend, ours and installed plug-ins: its kernels, or the reason why it cannot run."""
    from spformat import backends

    rows: list[dict[str, Any]] = []
    for name in backends.names():
        try:
            b = backends.get(name)
            rows.append({"name": name, "missing": list(b.missing()), "kernels": [k.name for k in b.kernels()]})
        except (ImportError, AttributeError) as e:
            rows.append({"name": name, "missing": [f"does not load: {e}"], "kernels": []})
    if as_json:
        print_json(rows)
        return
    t = table("backend", "here", "kernels")
    for r in rows:
        t.add_row(r["name"], "ready" if not r["missing"] else "; ".join(r["missing"]), ", ".join(r["kernels"]))
    console().print(t)
