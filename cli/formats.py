"""spformat formats: every registered format, its parameters and arrays."""

from __future__ import annotations

from rich.text import Text

from .options import Json
from .output import console, print_json
from .tables import table

EPILOG = "spformat formats --json"


def run(as_json: Json = False) -> None:
    """The formats a target may name, with parameters, arrays and value types."""
    from spformat.formats import composed, registered

    rows = []
    for f in (*registered(), *composed()):
        params = {d.name: {"range": d.range_text(), "doc": d.doc} for d in f.declared_params()}
        arrays = {d.name: {"kind": d.kind, "shape": list(d.dims), "doc": d.doc} for d in f.declared_arrays()}
        parts = {d.name: {"many": d.many, "doc": d.doc} for d in f.declared_parts()}
        rows.append({"name": f.name, "version": f.versions()[-1], "params": params, "arrays": arrays, "parts": parts,
                     "dtypes": list(f.value_dtypes), "paper": f.paper})  # fmt: skip
    if as_json:
        print_json(rows)
        return
    t = table("format", "parameters", "arrays", "values")
    for r in rows:
        # Text, for these line breaks are ours: those in plain cells are escaped.
        params_text = Text("\n".join(f"{k}: {v['range']}" for k, v in r["params"].items()))
        arrays_text = Text("\n".join([
            *(f"{k} [{', '.join(v['shape'])}]" for k, v in r["arrays"].items()),
            *(f"{k}: matrices of other formats" if v["many"] else f"{k}: a matrix" for k, v in r["parts"].items()),
        ]))  # fmt: skip
        t.add_row(r["name"], params_text, arrays_text, "all" if len(r["dtypes"]) > 6 else ", ".join(r["dtypes"]))
    console().print(t)
